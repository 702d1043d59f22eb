"""Speculative decoding: adds draft tokens to a step's chunks, and settles them after sampling.

A step reads all weights even if it computes few tokens. So besides a request's last token it may compute a few draft
tokens. The runner samples after each of them as if it were known, and drafts are accepted as far as the samples agree.
The answer is the same as without drafts, in fewer steps.

Where a grammar leaves no choice about the next tokens, these are the drafts, whether or not prompt lookup is on: names
and brackets of a JSON object then cost one step together.

Drafts never delay a request: they use the token budget that is left after everything else is scheduled, and free blocks
that are not cached, so they cause no preemption and no eviction. The results of a rejected draft are discarded: they
are not published, their block is released, and their slot is written again. Recurrent layers continue from a copy of
their state (state_group.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.sampling_params import AnswerSoFar
from decoder_svc.scheduling.scheduler_output import SampledToken, ScheduledChunk

# Most steps without drafts after a step in which all drafts were rejected.
MAX_PAUSE = 32
# Draft tokens per step of a request that has had none accepted yet.
FIRST_DRAFTS = 2
# Earlier places that are compared, the latest first. Repetitive text has many, and the latest is nearly always right.
MAX_PLACES = 16


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """Limits on draft tokens, and the n-gram lengths of the prompt look-up."""

    # Draft tokens of one request in one step; 0: no drafts.
    max_draft_tokens: int
    # Shortest and longest run of last tokens that is looked up in the request.
    ngram_min: int = 2
    ngram_max: int = 4
    # Draft tokens of all requests in one step about which their grammars leave no choice; 0: no such drafts.
    max_forced_tokens: int = 0


NO_SPECULATION = SpeculationLimits(0)


class Speculation:
    """Adds drafts to scheduled chunks, within the room that is left, and settles them after sampling."""

    def __init__(self, limits: SpeculationLimits, kv_cache: KVCacheManager, max_context_tokens: int) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._max_context_tokens = max_context_tokens
        self._drafters: dict[RequestId, _RequestDrafter] = {}
        # The latest drafts of each request that come from its drafter.
        self._guesses: dict[RequestId, tuple[int, ...]] = {}
        # Since start-up: draft tokens computed, and how many of them were accepted into an answer.
        self.num_drafted = 0
        self.num_accepted = 0

    def begin_forced(self, requests: Iterable[Request]) -> None:
        """Has grammars begin with the next tokens of these requests, while the engine passes on their last ones."""
        answers = _constrained(requests)
        if answers and self._limits.max_forced_tokens > 0:
            answers[0].constraint.follower.begin(answers, self._limits.max_forced_tokens)

    def add_drafts(
        self, chunks: list[ScheduledChunk], requests: Mapping[RequestId, Request], token_budget: int
    ) -> None:
        """Appends drafts to chunks in place, in order. `token_budget` is the part of the step's budget that is left."""
        if self._limits.max_draft_tokens == self._limits.max_forced_tokens == 0:
            return
        # Chunks that compute a request's last token, with the requests.
        last = [
            (index, request)
            for index, chunk in enumerate(chunks)
            for request in [requests[chunk.request_id]]
            if chunk.num_tokens == 1 and chunk.samples and chunk.start >= request.num_prompt_tokens
        ]
        forced = self._forced([request for _, request in last])
        forced_budget = self._limits.max_forced_tokens
        for index, request in last:
            chunk = chunks[index]
            room = min(token_budget, self._room(request))
            draft_ids = self._affordable(
                request, forced.get(request.request_id, ())[: max(0, min(room, forced_budget))]
            )
            if draft_ids:
                forced_budget -= len(draft_ids)
            else:
                draft_ids = self._guessed(request, min(room, self._limits.max_draft_tokens))
            if draft_ids:
                chunks[index] = self._lengthened(chunk, request, draft_ids)
                token_budget -= len(draft_ids)
                self.num_drafted += len(draft_ids)

    def settle(self, request: Request, chunk: ScheduledChunk, sampled: Sequence[SampledToken], num_taken: int) -> None:
        """Publishes the blocks of accepted drafts and releases those of rejected ones.

        Args:
            sampled: The sampled tokens: all but the last equal the chunk's drafts.
            num_taken: How many of them were appended to the request; fewer than all if one of them ended it.
        """
        num_agreed = len(sampled) - 1
        assert tuple(token.token_id for token in sampled[:-1]) == chunk.draft_ids[:num_agreed], "a draft was changed"
        # Forced tokens say nothing about how well the drafter guesses.
        if self._guesses.get(request.request_id) == chunk.draft_ids:
            self._drafters[request.request_id].settle(num_agreed, len(chunk.draft_ids))
        self.num_accepted += min(num_agreed, num_taken)
        # All taken tokens are computed except the last.
        request.num_computed_tokens += num_taken - 1
        self._kv_cache.publish(request, request.num_computed_tokens, is_computed=True)
        self._kv_cache.cut(request)
        self._kv_cache.settle_draft_states(request)

    def forget(self, request_id: RequestId) -> None:
        """Drops the state of a request that ended; it may have none."""
        self._guesses.pop(request_id, None)
        self._drafters.pop(request_id, None)

    def _room(self, request: Request) -> int:
        """Returns the number of drafts that the request's answer and the context have room for."""
        # The last token of an answer is only sampled, never computed.
        num_answer_tokens_left = request.params.max_tokens - request.num_output_tokens - 1
        num_context_tokens_left = self._max_context_tokens - request.num_tokens - 1
        return min(num_answer_tokens_left, num_context_tokens_left)

    def _forced(self, requests: Sequence[Request]) -> dict[RequestId, tuple[int, ...]]:
        """Returns the next tokens about which grammars leave no choice, of all requests that have one."""
        constrained = [request for request in requests if request.constraint is not None]
        answers = _constrained(constrained)
        if not answers or self._limits.max_forced_tokens == 0:
            return {}
        found = answers[0].constraint.follower.forced(answers, self._limits.max_forced_tokens)
        return {request.request_id: tuple(forced) for request, forced in zip(constrained, found, strict=True)}

    def _guessed(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Returns the drafter's guesses, as far as blocks are free."""
        if num_tokens < 1:
            return ()
        drafter = self._drafters.get(request.request_id)
        if drafter is None:
            drafter = self._drafters[request.request_id] = _RequestDrafter(self._limits)
        draft_ids = self._affordable(request, drafter.propose(request, num_tokens))
        self._guesses[request.request_id] = draft_ids
        return draft_ids

    def _affordable(self, request: Request, draft_ids: tuple[int, ...]) -> tuple[int, ...]:
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
            states=self._kv_cache.add_draft_states(request, chunk, len(draft_ids)),
        )


def _constrained(requests: Iterable[Request]) -> list[AnswerSoFar]:
    return [
        AnswerSoFar(request.constraint, request.token_ids) for request in requests if request.constraint is not None
    ]


class _RequestDrafter:
    """Proposes one request's drafts, and adapts their number to how many are accepted.

    It starts with FIRST_DRAFTS tokens and doubles them whenever all were accepted. After a step in which none was
    accepted it returns to FIRST_DRAFTS and pauses for one step, then two, four … up to MAX_PAUSE, until a draft is
    accepted. So text without repetition costs little.
    """

    def __init__(self, limits: SpeculationLimits) -> None:
        self._proposer = NgramProposer(limits.ngram_min, limits.ngram_max)
        self._max_drafts = FIRST_DRAFTS
        # Length of the pause after the latest failure, and how much of it is left, in steps.
        self._pause = 0
        self._num_pause_steps_left = 0

    def propose(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Returns at most `num_tokens` drafts, none during a pause, and none from a stop token on."""
        if self._num_pause_steps_left > 0:
            self._num_pause_steps_left -= 1
            return ()
        draft_ids = self._proposer.propose(request.token_ids, min(num_tokens, self._max_drafts))
        for index, token_id in enumerate(draft_ids):
            if token_id in request.params.stop_token_ids:
                return tuple(draft_ids[:index])
        return tuple(draft_ids)

    def settle(self, num_agreed: int, num_drafts: int) -> None:
        """Notes that `num_agreed` of the latest `num_drafts` drafts were accepted."""
        if num_agreed == num_drafts:
            # Doubles the number that was computed, which is below the maximum if room was short.
            self._max_drafts = max(self._max_drafts, 2 * num_drafts)
        elif num_agreed == 0:
            self._max_drafts = FIRST_DRAFTS
        self._pause = 0 if num_agreed else min(2 * self._pause or 1, MAX_PAUSE)
        self._num_pause_steps_left = self._pause


class NgramProposer:
    """Prompt lookup decoding (Saxena 2023): proposes the tokens that followed an earlier occurrence of the last ones.

    It looks up the end of one sequence in the sequence itself, which only ever grows. The index grows with it, so the
    cost of a look-up does not depend on the length. Knows token ids only.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        """A match is at least `min_length` tokens long; among several, longer ones win, up to `max_length` tokens."""
        assert 1 <= min_length <= max_length
        self._min_length = min_length
        self._max_length = max_length
        # A place is the index of the token behind a run of `min_length` tokens. Maps each run to its latest place.
        self._latest: dict[tuple[int, ...], int] = {}
        # Maps each place to the previous place of the same run; 0: there is none.
        self._earlier: list[int] = [0] * min_length

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Proposes `num_tokens` ids to follow `token_ids`, or none if its last tokens did not occur before.

        Copies from the earlier occurrence with the longest match, or the latest of several. A copy that reaches the
        end continues with its own output (as in LZ77), so even a short loop is continued for `num_tokens` tokens.
        """
        self._index(token_ids)
        place = self._best_place(token_ids)
        if place == 0:
            return []
        copied = list(token_ids[place : place + num_tokens])
        period = len(token_ids) - place
        while len(copied) < num_tokens:
            copied.append(copied[len(copied) - period])
        return copied

    def _index(self, token_ids: Sequence[int]) -> None:
        """Indexes the n-gram before each new token. The n-gram at the end has no next token yet and waits for it."""
        latest, earlier, length = self._latest, self._earlier, self._min_length
        for place in range(len(earlier), len(token_ids)):
            run = tuple(token_ids[place - length : place])
            earlier.append(latest.get(run, 0))
            latest[run] = place

    def _best_place(self, token_ids: Sequence[int]) -> int:
        """Returns the place with the longest match, or 0 if there is none."""
        best = best_length = 0
        place = self._latest.get(tuple(token_ids[-self._min_length :]), 0)
        for _ in range(MAX_PLACES):
            if place == 0 or best_length == self._max_length:
                break
            length = self._match_length(token_ids, place)
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best

    def _match_length(self, token_ids: Sequence[int], place: int) -> int:
        """Returns how many tokens before `place` equal those at the end; at least `min_length` are known to."""
        length, end = self._min_length, len(token_ids)
        longest = min(self._max_length, place)
        while length < longest and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length
