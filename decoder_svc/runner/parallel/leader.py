"""Rank 0's side of a split model: it tells the other ranks what it computes, before it does.

Only rank 0 schedules, knows requests and images, and samples. The others hold no state but their part of the KV cache,
whose blocks have the same ids everywhere: what they are told of a step is all that they need for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from torch import Tensor

from decoder_svc.runner.adapters.adapter_table import AdaptedTokens
from decoder_svc.runner.adapters.low_rank import LowRank
from decoder_svc.runner.input_batch import FlatInputs
from decoder_svc.runner.language_pass import LanguagePass
from decoder_svc.runner.parallel.messages import (
    AdapterMatrices,
    Allocate,
    Forward,
    Head,
    Matrix,
    Message,
    PlaceAdapter,
    Step,
    encoded,
)
from decoder_svc.runner.parallel.rank_group import RankGroup


class LostRankError(BaseException):
    """Another rank has ended, or this one failed while the others computed with it. The engine must end.

    It is no Exception, because a step that fails must not be followed by another one here: the ranks would not be in
    the same step any more.
    """


class Leader:
    """Tells the other ranks. One thread uses it."""

    def __init__(self, group: RankGroup, connections: Sequence[Connection]) -> None:
        """`connections` lead to the other ranks."""
        self.group = group
        self._connections = connections
        self._has_images = False
        # Whether the step has tokens whose ids the step before it samples on this rank's device.
        self._has_unknown_ids = False

    def allocate(self, num_blocks: int, num_sliding_blocks: int, num_snapshots: int) -> None:
        """Makes the pools of all other ranks."""
        self._tell(Allocate(num_blocks, num_sliding_blocks, num_snapshots))

    def place_adapter(self, slot: int, low_ranks: Mapping[str, LowRank] | None) -> None:
        """Adds an adapter on all other ranks, or takes one away."""
        for name, low_rank in (low_ranks or {}).items():
            self._tell(AdapterMatrices(name, Matrix.of(low_rank.down), Matrix.of(low_rank.up)))
        self._tell(PlaceAdapter(slot, low_ranks is not None))

    def begin_step(self, flat: FlatInputs, adapted: tuple[AdaptedTokens, ...], *, has_images: bool) -> None:
        """Begins a step on all other ranks. `has_images`: rows of images will take the place of embeddings."""
        self._has_images = has_images
        self._has_unknown_ids = bool(flat.unknown)
        self._tell(Step(flat, adapted))

    def complete_ids(self, token_ids: Tensor) -> None:
        """Gives all other ranks the ids of the step that has begun if the host does not know all of them yet."""
        if self._has_unknown_ids:
            self.group.send_from_first([token_ids])

    @contextmanager
    def forward(
        self, embeddings: Tensor, levels: Sequence[Tensor] = (), has_row: Tensor | None = None
    ) -> Iterator[None]:
        """Lets all ranks compute the layers of the step that has begun; this rank does so in the block."""
        num_level_rows = len(levels[0]) if levels else 0
        self._tell(Forward(self._has_images, len(levels), num_level_rows))
        with together():
            if self._has_images:
                self.group.send_from_first([embeddings.contiguous()])
            if has_row is not None:
                self.group.send_from_first([has_row, *(level.contiguous() for level in levels)])
            yield

    @contextmanager
    def head(self, hidden: Tensor) -> Iterator[None]:
        """Lets all ranks compute their logits of hidden states; this rank does so in the block."""
        self._tell(Head(len(hidden)))
        with together():
            self.group.send_from_first([hidden.contiguous()])
            yield

    def _tell(self, message: Message) -> None:
        with together():
            data = encoded(message)
            for connection in self._connections:
                connection.send_bytes(data)


@contextmanager
def together() -> Iterator[None]:
    """Turns any failure in the block into LostRankError."""
    try:
        yield
    except Exception as error:
        raise LostRankError("the ranks of the split model have lost each other") from error


class LeadingPass:
    """The forward passes of a split model (LanguagePass), on rank 0."""

    # A split model is not recorded as graphs.
    records_rows = False

    def __init__(self, language: LanguagePass, leader: Leader) -> None:
        self._language = language
        self._leader = leader

    def look_up_rows(self, token_ids: Tensor) -> Tensor:
        """Calls LanguagePass.look_up_rows for the step that has begun."""
        with together():
            self._leader.complete_ids(token_ids)
            return self._language.look_up_rows(token_ids)

    def split_levels(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Calls LanguagePass.split_levels, in which no other rank has a part."""
        return self._language.split_levels(rows)

    def logits(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled: Tensor | None,
        token_ids: Tensor | None = None,
        *,
        needs_all_tokens: bool = False,
    ) -> Tensor:
        """Calls LanguagePass.logits for the step that has begun."""
        with self._leader.forward(embeddings):
            return self._language.logits(embeddings, positions, sampled, token_ids, needs_all_tokens=needs_all_tokens)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Calls LanguagePass.logits_of on all ranks, each for its part of the vocabulary."""
        with self._leader.head(hidden):
            return self._language.logits_of(hidden)

    def logits_with_levels(
        self, embeddings: Tensor, positions: Tensor, sampled: Tensor, has_row: Tensor, levels: Sequence[Tensor]
    ) -> Tensor:
        """Calls LanguagePass.logits_with_levels for the step that has begun."""
        with self._leader.forward(embeddings, levels, has_row):
            return self._language.logits_with_levels(embeddings, positions, sampled, has_row, levels)
