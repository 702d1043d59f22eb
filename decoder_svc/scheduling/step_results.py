"""Applies steps to their requests: counts chunks as computed, and appends the sampled tokens.

The scheduler decides what to compute, and ends the requests that are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.request import Request, RequestState
from decoder_svc.scheduling.row_demand import RowDemand
from decoder_svc.scheduling.scheduler_output import SampledToken, ScheduledChunk, TokenUpdate
from decoder_svc.scheduling.speculation import Speculation


class StepResults:
    """Moves requests forward by the chunks and tokens of steps."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        row_demand: RowDemand,
        speculation: Speculation,
        max_context_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """`clock` returns seconds on the same scale as `Request.arrival_s`."""
        self._kv_cache = kv_cache
        self._row_demand = row_demand
        self._speculation = speculation
        self._max_context_tokens = max_context_tokens
        self._clock = clock

    def advance(self, request: Request, chunk: ScheduledChunk) -> None:
        """Counts the chunk as computed, without its drafts, and the token that it samples as unknown."""
        request.num_computed_tokens += chunk.num_tokens - len(chunk.draft_ids)
        request.num_unknown_tokens += chunk.samples
        self._kv_cache.release_unseen(request)
        self._row_demand.pass_computed(request)

    def take(self, request: Request, chunk: ScheduledChunk, sampled: Sequence[SampledToken]) -> list[TokenUpdate]:
        """Appends the sampled tokens of an advanced chunk, up to the one that ends the request.

        The request may have been preempted after the chunk was launched: it keeps the tokens.
        """
        request.num_unknown_tokens = 0
        updates: list[TokenUpdate] = []
        for index, token in enumerate(sampled):
            updates.append(self._append(request, token, was_draft=index < len(sampled) - 1))
            if updates[-1].finish_reason is not None:
                break
        if chunk.draft_ids:
            self._speculation.settle(request, chunk, sampled, len(updates))
            self._kv_cache.release_unseen(request)
        elif request.state is RequestState.RUNNING:
            # The chunk's own tokens are known now, also the last one.
            self._kv_cache.publish(request, chunk.start + chunk.num_tokens, is_computed=True)
        return updates

    def _append(self, request: Request, token: SampledToken, *, was_draft: bool) -> TokenUpdate:
        if request.num_output_tokens == 0:
            request.usage.time_to_first_token_s = self._clock() - request.arrival_s
        request.token_ids.append(token.token_id)
        request.usage.completion_tokens = request.num_output_tokens
        request.usage.accepted_draft_tokens += was_draft
        return TokenUpdate(request, token, request.finish_reason_now(self._max_context_tokens), was_draft)
