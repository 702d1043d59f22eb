"""Pools the last hidden states of prompts whose embedding is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decoder_svc.runner.input_batch import InputBatch
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import Pooling
from decoder_svc.scheduling.scheduler_output import ScheduledChunk
from lookonce.model.half_model import text_child


class HiddenStates:
    """The output of the language model's last layer, behind its norm, while it is kept."""

    def __init__(self, model: Any) -> None:
        """`model` is the language half."""
        self._text_model = getattr(model.model, text_child(model))
        self._kept: Tensor | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keeps the hidden states of the forward pass in the block."""

        def keep(_: Any, __: Any, output: Any) -> None:
            self._kept = output.last_hidden_state[0]

        handle = self._text_model.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> Tensor:
        """Returns the hidden states of the pass, `[num_tokens, hidden_size]`, and forgets them."""
        kept, self._kept = self._kept, None
        assert kept is not None, "no pass was kept"
        return kept


def wants_hidden_states(chunks: Sequence[ScheduledChunk], batch: InputBatch) -> bool:
    """Whether any chunk has tokens of a prompt whose embedding is asked for."""
    return any(batch[chunk.request_id].params.pooling is not None for chunk in chunks)


def pooled(hidden: Tensor, chunks: Sequence[ScheduledChunk], batch: InputBatch) -> dict[RequestId, Tensor]:
    """Returns the embeddings of the prompts that end in this pass, float32 `[hidden_size]`.

    Means are summed up in the rows of the batch until their prompts end.
    """
    found: dict[RequestId, Tensor] = {}
    first = 0
    for chunk in chunks:
        row, stop = batch[chunk.request_id], first + chunk.num_tokens
        if row.params.pooling is Pooling.LAST and chunk.samples:
            found[chunk.request_id] = hidden[stop - 1].float()
        elif row.params.pooling is Pooling.MEAN:
            # float64, so that the sum does not depend on the chunks beyond rounding.
            total = hidden[first:stop].sum(0, dtype=torch.float64)
            row.hidden_sum = total if row.hidden_sum is None else row.hidden_sum + total
            if chunk.samples:
                found[chunk.request_id] = (row.hidden_sum / row.num_prompt_tokens).float()
        first = stop
    return found
