"""The steps of a rank of a split model that is not rank 0: it computes what that one tells it."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from decoder_svc.runner.adapters.low_rank import LowRank
from decoder_svc.runner.attention import forward_context
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.parallel.messages import AdapterMatrices, Allocate, Forward, Head, PlaceAdapter, Step, received
from decoder_svc.runner.parallel.rank_group import RankGroup
from decoder_svc.runner.step_metadata import PreparedInputs


class RankSteps:
    """Runs one rank's part of each step, and keeps nothing but its part of the KV cache."""

    def __init__(self, runner: ModelRunnerBase, group: RankGroup, connection: Connection) -> None:
        """`connection` leads to rank 0, whose Leader sends the messages."""
        self._runner = runner
        self._group = group
        self._connection = connection
        # The matrices of the adapter that rank 0 is telling of.
        self._matrices: dict[str, LowRank] = {}
        self._hidden_size = int(runner.model.config.get_text_config().hidden_size)

    def run(self) -> None:
        """Computes until rank 0 has ended. Raises RuntimeError when another rank ends in the midst of a step."""
        with torch.inference_mode():
            while True:
                try:
                    message = received(self._connection)
                except (EOFError, OSError):
                    return
                if isinstance(message, Allocate):
                    sizes = message.num_blocks, message.num_sliding_blocks, message.num_snapshots
                    self._runner.initialize_kv_cache(*sizes)
                elif isinstance(message, AdapterMatrices):
                    self._matrices[message.name] = LowRank(message.down.tensor(), message.up.tensor())
                elif isinstance(message, PlaceAdapter):
                    self._place(message)
                elif isinstance(message, Step):
                    self._compute(message)
                else:
                    assert isinstance(message, Head), "rank 0 sends nothing else"
                    hidden = self._empty(message.num_rows)
                    self._group.send_from_first([hidden])
                    self._runner.language.logits_of(hidden)

    def _place(self, place: PlaceAdapter) -> None:
        assert self._runner.adapters is not None, "rank 0 tells of adapters"
        self._runner.adapters.follow(place.slot, self._matrices if place.is_there else None)
        self._matrices.clear()

    def _compute(self, step: Step) -> None:
        if self._runner.adapters is not None:
            self._runner.adapters.tokens = step.adapted
        # Rank 0 completes the ids: it samples them.
        inputs = self._runner.prepare_inputs(replace(step.flat, unknown=()))
        if step.flat.unknown:
            self._group.send_from_first([inputs.token_ids])
        language = self._runner.language
        embeddings = language.split_levels(language.look_up_rows(inputs.token_ids))[0]
        forward = received(self._connection)
        assert isinstance(forward, Forward), "a step is computed once it has begun"
        if forward.sends_embeddings:
            embeddings = embeddings.contiguous()
            self._group.send_from_first([embeddings])
        with forward_context(self._runner.backend, inputs.metadata):
            self._forward(forward, inputs, embeddings)

    def _forward(self, forward: Forward, inputs: PreparedInputs, embeddings: Tensor) -> None:
        language, positions, sampled = self._runner.language, inputs.positions, inputs.sampled_indexes
        if not forward.num_levels:
            language.logits(embeddings, positions, sampled, inputs.token_ids)
            return
        has_row = torch.zeros(len(embeddings), dtype=torch.bool, device=self._runner.device)
        levels = [self._empty(forward.num_level_rows) for _ in range(forward.num_levels)]
        self._group.send_from_first([has_row, *levels])
        language.logits_with_levels(embeddings, positions, sampled, has_row, levels)

    def _empty(self, num_rows: int) -> Tensor:
        shape = (num_rows, self._hidden_size)
        return torch.empty(shape, dtype=self._runner.model.dtype, device=self._runner.device)
