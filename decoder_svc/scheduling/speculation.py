"""Guessed tokens behind a step's chunks (drafts): which requests get some, how many, and what became of them.

A step reads all weights however few tokens it computes. So beside a request's last token it may compute a few that are
only guessed; the runner samples behind each as if it were known, and the guesses count as far as the samples agree with
them. What is sampled is what it would have been, in fewer steps.

Nobody waits for a guess: drafts take what is left of the step's token budget when everybody has been scheduled, and
blocks that are free and have no name, so nobody is preempted and nothing that is cached goes. What was computed from a
rejected draft is never seen again: it gets no name, its block is given back, and its slot is written anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decoder_svc.scheduling.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.ngram_proposer import NgramProposer
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.scheduler_output import SampledToken, ScheduledChunk

# Steps without drafts after drafts that came to nothing, at most.
MAX_PAUSE = 32
# Drafts of a request that has not shown yet that it repeats anything.
FIRST_DRAFTS = 2


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """How much is guessed, and from what."""

    # Guessed tokens of one request in one step; 0: nothing is guessed.
    max_draft_tokens: int
    # Last tokens of a request that must have occurred in it before, at least and at most.
    ngram_min: int = 2
    ngram_max: int = 4


NO_SPECULATION = SpeculationLimits(0)


class Speculation:
    """What is guessed for which request. The scheduler's half that knows drafts."""

    def __init__(self, limits: SpeculationLimits, kv_cache: KVCacheManager, max_context_tokens: int) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._max_context_tokens = max_context_tokens
        self._drafters: dict[RequestId, _RequestDrafter] = {}
        # Since the start: drafts computed, and how many of them became tokens of an answer.
        self.num_drafted = 0
        self.num_accepted = 0

    def add_drafts(
        self, chunks: list[ScheduledChunk], requests: Mapping[RequestId, Request], token_budget: int
    ) -> None:
        """Lengthens chunks in place, in their order; `token_budget` is what nobody else has use for."""
        if self._limits.max_draft_tokens == 0:
            return
        for index, chunk in enumerate(chunks):
            request = requests[chunk.request_id]
            if chunk.num_tokens > 1 or not chunk.samples or chunk.start < request.num_prompt_tokens:
                continue
            draft_ids = self._drafts(request, token_budget)
            if draft_ids:
                chunks[index] = self._lengthened(chunk, request, draft_ids)
                token_budget -= len(draft_ids)
                self.num_drafted += len(draft_ids)

    def settle(self, request: Request, chunk: ScheduledChunk, sampled: Sequence[SampledToken], num_taken: int) -> None:
        """Tells what became of a chunk's drafts: `sampled` agrees with all but its last; `num_taken` were appended.

        Fewer are where the request ends before. What is computed and right gets its names, the rest is given back.
        """
        num_agreed = len(sampled) - 1
        assert tuple(token.token_id for token in sampled[:-1]) == chunk.draft_ids[:num_agreed], "a draft was changed"
        self._drafters[request.request_id].settle(num_agreed, len(chunk.draft_ids))
        self.num_accepted += min(num_agreed, num_taken)
        # Of the tokens taken the last has not been computed.
        request.num_computed_tokens += num_taken - 1
        self._kv_cache.publish(request, request.num_computed_tokens)
        self._kv_cache.cut(request)

    def forget(self, request_id: RequestId) -> None:
        """The request ended; one that never guessed is fine."""
        self._drafters.pop(request_id, None)

    def _drafts(self, request: Request, token_budget: int) -> tuple[int, ...]:
        """Guesses that may be computed beside the request's last token."""
        # The last token of an answer is sampled and not computed.
        num_answer_tokens_left = request.params.max_tokens - request.num_output_tokens - 1
        num_context_tokens_left = self._max_context_tokens - request.num_tokens - 1
        num_wanted = min(self._limits.max_draft_tokens, token_budget, num_answer_tokens_left, num_context_tokens_left)
        if num_wanted < 1:
            return ()
        drafter = self._drafters.get(request.request_id)
        if drafter is None:
            drafter = self._drafters[request.request_id] = _RequestDrafter(self._limits)
        draft_ids = drafter.guess(request, num_wanted)
        return draft_ids[: self._kv_cache.num_spare_tokens(request, request.num_tokens, len(draft_ids))]

    def _lengthened(self, chunk: ScheduledChunk, request: Request, draft_ids: tuple[int, ...]) -> ScheduledChunk:
        num_tokens = chunk.num_tokens + len(draft_ids)
        self._kv_cache.allocate(request, num_tokens)
        _, block_ids = self._kv_cache.take_table_changes(request.request_id)
        sliding, more_sliding = chunk.sliding, self._kv_cache.take_sliding_changes(request.request_id)
        if sliding is not None and more_sliding is not None:
            sliding = replace(sliding, block_ids=sliding.block_ids + more_sliding.block_ids)
        return replace(
            chunk,
            num_tokens=num_tokens,
            block_ids=chunk.block_ids + block_ids,
            sliding=sliding,
            draft_ids=draft_ids,
        )


class _RequestDrafter:
    """One request's look-ups, and how much they are worth.

    It begins with FIRST_DRAFTS; where all are right there are twice as many the next time. After a step in which none
    was right the request begins anew, and sits out one step before, then two, four … up to MAX_PAUSE, until one is
    right: text that repeats nothing costs little.
    """

    def __init__(self, limits: SpeculationLimits) -> None:
        self._proposer = NgramProposer(limits.ngram_min, limits.ngram_max)
        self._max_drafts = FIRST_DRAFTS
        # After the latest failure, and what is left of it, steps.
        self._pause = 0
        self._num_steps_to_sit_out = 0

    def guess(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """At most so many; none while it sits out. A guess that would end the answer is worth nothing."""
        if self._num_steps_to_sit_out > 0:
            self._num_steps_to_sit_out -= 1
            return ()
        draft_ids = self._proposer.propose(request.token_ids, min(num_tokens, self._max_drafts))
        for index, token_id in enumerate(draft_ids):
            if token_id in request.params.stop_token_ids:
                return tuple(draft_ids[:index])
        return tuple(draft_ids)

    def settle(self, num_agreed: int, num_drafts: int) -> None:
        """So many of the latest guesses were right."""
        if num_agreed == num_drafts:
            # No more than were computed: where room was short, nothing is known of more.
            self._max_drafts = max(self._max_drafts, 2 * num_drafts)
        elif num_agreed == 0:
            self._max_drafts = FIRST_DRAFTS
        self._pause = 0 if num_agreed else min(2 * self._pause or 1, MAX_PAUSE)
        self._num_steps_to_sit_out = self._pause
