"""Requests that hold no blocks, in serving order, with what the prefix cache has of each.

The scheduler's half that knows who waits. It answers questions; whether to admit is the scheduler's to say.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from itertools import islice

from decoder_svc.scheduling.kv_cache_manager import KVCacheManager, PrefixHit
from decoder_svc.scheduling.request import Request, RequestId


def enqueue(queue: list[Request], request: Request) -> None:
    """Puts a request into its place of the serving order: priority, then arrival."""
    insort(queue, request, key=lambda other: (other.priority, other.arrival_s))


class WaitingQueue:
    """In serving order. A preempted request returns to the place it had."""

    def __init__(self, kv_cache: KVCacheManager, clock: Callable[[], float]) -> None:
        """`clock` gives seconds on the scale of `Request.deadline_s`."""
        self._kv_cache = kv_cache
        self._clock = clock
        self._requests: list[Request] = []
        # The prefix cache's version at the look-up, and what was found.
        self._prefix_hits: dict[RequestId, tuple[int, PrefixHit]] = {}
        self._step_began_s = 0.0
        # Of all steps so far; 0 before the first.
        self._best_s_per_token = 0.0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Lets a request wait in its place of the serving order."""
        enqueue(self._requests, request)

    def remove(self, request: Request) -> None:
        """The request was admitted or ended. Raises ValueError when it does not wait."""
        self._requests.remove(request)
        self._prefix_hits.pop(request.request_id, None)

    def first(self, num_requests: int) -> list[Request]:
        """At most so many from the head."""
        return list(islice(self._requests, num_requests))

    def is_head(self, request: Request) -> bool:
        """Whether this one is served next."""
        return self._requests[0] is request

    def prefix_hit(self, request: Request, *, may_be_old: bool) -> PrefixHit:
        """What the prefix cache has of a waiting request; looked up again only when the cache changed."""
        version = self._kv_cache.version
        known = self._prefix_hits.get(request.request_id)
        if known is None or (known[0] != version and not may_be_old):
            known = self._prefix_hits[request.request_id] = (version, self._kv_cache.find_prefix(request))
        return known[1]

    def must_miss_deadline(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request cannot have its first token before its deadline.

        Its uncached tokens are counted at the best pace that any step had so far: who could still make it is kept.
        """
        if request.deadline_s is None:
            return False
        least_s = (request.num_tokens - hit.num_tokens) * self._best_s_per_token
        return request.deadline_s <= self._clock() + least_s

    def begin_step(self) -> None:
        """A step begins, whose pace `end_step` tells."""
        self._step_began_s = self._clock()

    def end_step(self, num_tokens: int) -> None:
        """The step that began last has computed so many tokens."""
        if num_tokens:
            s_per_token = (self._clock() - self._step_began_s) / num_tokens
            self._best_s_per_token = min(self._best_s_per_token or s_per_token, s_per_token)
