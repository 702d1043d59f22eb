"""Gives places of the running batch, and blocks, from tenants with more than their share to those with less.

`tenant_shares.py` counts who has how many; here, requests come forward in the queue, and running ones yield.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager, PrefixHit
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.row_demand import RowDemand
from decoder_svc.scheduling.scheduler_limits import ChunkSize
from decoder_svc.scheduling.tenant_shares import TenantShares
from decoder_svc.scheduling.waiting_queue import WaitingQueue


class PlaceSharing:
    """Decides at the beginning of a step which running requests give their places."""

    def __init__(
        self,
        tenants: TenantShares,
        waiting: WaitingQueue,
        kv_cache: KVCacheManager,
        row_demand: RowDemand,
        chunk_size: ChunkSize,
        max_num_seqs: int,
    ) -> None:
        self._tenants = tenants
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._row_demand = row_demand
        self._chunk_size = chunk_size
        self._max_num_seqs = max_num_seqs

    def yielding(self, running: Sequence[Request], num_live: int) -> Iterator[tuple[Request, int]]:
        """Brings waiting requests forward. Yields the running ones to preempt for them, with the turns that they get.

        Each must be preempted before the next one is asked for. A request gets places and blocks of others once, and
        only when it could start.
        """
        if self._tenants.num_tenants < 2 or not len(self._waiting):
            return
        (head,) = self._waiting.first(1)
        num_free = self._max_num_seqs - len(running)
        # Without free blocks there are no more places than are taken, and one for which others give theirs.
        is_short = num_free > 0 and not self._kv_cache.can_admit(head, self._hit(head))
        num_places = len(running) + 1 if is_short else min(self._max_num_seqs, num_live)
        claims = self._tenants.claims(num_places, head.priority, running)
        if claims is None:
            return
        claimants = self._waiting.bring_forward(claims.num_places, claims.latest_turn, self._row_demand.restart)
        for request in claimants:
            hit = self._hit(request)
            if request.has_claimed or not self._could_start(request, hit):
                continue
            latest = list(self._tenants.requests_to_yield(running, request, claims.share))
            if not self._would_fit(request, hit, num_free, latest):
                continue
            for yielding in latest:
                if num_free > 0 and self._kv_cache.can_admit(request, hit):
                    break
                # It waits behind all that came forward. Turns of other priorities have nothing to do with these.
                is_equal = yielding.priority == request.priority
                yield yielding, max(yielding.turn, claimants[-1].turn + 1) if is_equal else yielding.turn
                request.has_claimed = True
                num_free += 1
            num_free -= 1

    def _would_fit(self, request: Request, hit: PrefixHit, num_free: int, yielding: Sequence[Request]) -> bool:
        """Whether a request could start if these gave their places. Their blocks may be shared: then it may not."""
        if num_free + len(yielding) <= 0:
            return False
        num_blocks = sum(len(self._kv_cache.block_table(one.request_id)) for one in yielding)
        num_needed = self._kv_cache.num_blocks_for_admission(request, hit)
        return num_needed <= self._kv_cache.pool.num_free_blocks + num_blocks

    def _hit(self, request: Request) -> PrefixHit:
        return self._waiting.prefix_hit(request, may_be_old=False)

    def _could_start(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a waiting request could start now if it had a place and blocks."""
        if request.num_unknown_tokens > 0 or self._kv_cache.finds_more_next_step(request, hit):
            return False
        stop = self._row_demand.runnable_stop(request, hit.num_tokens)
        return stop >= hit.num_tokens + self._chunk_size.least(request, hit.num_tokens)
