"""Completes a step's inputs with ids that the step before it samples, on the device and without the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class TokenFeed:
    """The sampled ids of the latest step, on the device."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        """`move` copies a tensor from host memory to the device."""
        self._move = move
        self._sampled: Tensor | None = None
        # The latest pairs and, on the device, their indexes and places: a batch that only decodes has the same again.
        self._unknown: tuple[tuple[int, int], ...] = ()
        self._indexes: Tensor | None = None
        self._places: Tensor | None = None

    def keep(self, sampled: Sequence[Tensor]) -> None:
        """Replaces the sampled ids by those of the step that was launched last, given for each of its passes."""
        self._sampled = torch.cat(list(sampled)) if len(sampled) > 1 else next(iter(sampled), None)

    def write(self, unknown: tuple[tuple[int, int], ...], token_ids: Tensor) -> None:
        """Writes sampled ids over the ids of unknown tokens: (index in `token_ids`, place among the sampled ids)."""
        if not unknown:
            return
        assert self._sampled is not None, "a step knows neither a token nor who samples it"
        if all(index == place for index, place in unknown) and len(unknown) == len(self._sampled):
            token_ids[: len(unknown)].copy_(self._sampled)
            return
        if unknown != self._unknown:
            self._indexes, self._places = (self._move(torch.tensor(column)) for column in zip(*unknown, strict=True))
            self._unknown = unknown
        token_ids.index_copy_(0, self._indexes, self._sampled.index_select(0, self._places))
