"""Recurrent layers for the oracle: the states of requests and snapshots, each known by the tokens that it has seen."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.scheduler_output import ScheduledChunk, SchedulerOutput
from tests.decoder_svc.scheduling.truth import truth

# The state before the first token.
EMPTY = "empty"
GARBAGE = "garbage"


class States:
    """The content of each slot and of each snapshot: all that the state behind its last token depends on."""

    def __init__(self) -> None:
        self._slots: dict[int, Hashable] = {}
        self._snapshots: dict[int, Hashable] = {}
        # Chunks that continued a snapshot, so that tests see whether there were any.
        self.num_loaded = 0

    def check(self, output: SchedulerOutput) -> None:
        """Raises AssertionError where chunks of one step share a slot, or write a snapshot that another one uses."""
        uses = [chunk.states for chunk in output.chunks if chunk.states is not None]
        assert len({use.slot for use in uses}) == len(uses), "two requests have one slot"
        taken = [snapshot for use in uses for _, snapshot in use.taken]
        assert len(set(taken)) == len(taken), "a snapshot is written twice"
        assert not set(taken) & {use.loaded for use in uses}, "a snapshot is written and read in one step"

    def compute(self, request: Request, chunk: ScheduledChunk, token_ids: Sequence[int]) -> None:
        """Advances a slot by a chunk; raises AssertionError if it does not begin with the state before the chunk."""
        use = chunk.states
        assert use is not None, "the runner is not told of the state"
        if use.loaded is not None:
            self.num_loaded += 1
            before = self._snapshots.get(use.loaded)
        else:
            before = EMPTY if chunk.start == 0 else self._slots.get(use.slot)
        assert before == _behind(request, token_ids, chunk.start), f"{request} continues another state"
        token_ids = [*token_ids, *chunk.draft_ids]
        stop = chunk.start + chunk.num_tokens
        for num_tokens, snapshot in use.taken:
            assert chunk.start < num_tokens <= stop, "a snapshot of a token that is not computed here"
            self._snapshots[snapshot] = _behind(request, token_ids, num_tokens)
        self._slots[use.slot] = _behind(request, token_ids, stop)

    def spoil(self, chunk: ScheduledChunk) -> None:
        """Marks all that a chunk wrote as garbage."""
        assert chunk.states is not None, "the runner is not told of the state"
        self._slots[chunk.states.slot] = GARBAGE
        for _, snapshot in chunk.states.taken:
            self._snapshots[snapshot] = GARBAGE


def _behind(request: Request, token_ids: Sequence[int], num_tokens: int) -> Hashable:
    """Returns what the state behind the first `num_tokens` tokens depends on."""
    return EMPTY if num_tokens == 0 else truth(request, token_ids, num_tokens - 1)
