"""Adapters of a split model: each rank adds its part of what an adapter adds to the layers of which it has a part.

A layer that is divided by its outputs gets the rows of `up` that belong to them. A layer that is divided by its inputs
gets the columns of `down` that belong to them, and what it adds is summed over the ranks with its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from decoder_svc.runner.adapters.adapter_table import AdaptedModules, AdapterTable
from decoder_svc.runner.adapters.low_rank import LowRank
from decoder_svc.runner.parallel.rank_group import RankGroup
from decoder_svc.runner.parallel.split_layers import GatheredColumns, SplitRows


class SplitAdapters:
    """The layers of one rank, to which adapters are added (AdaptedModel)."""

    def __init__(
        self, text_model: Any, table: AdapterTable, group: RankGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`text_model` is split, and its linear layers are those that compute."""
        self._modules = AdaptedModules(text_model, table, device, dtype)
        self._group = group
        # The layers as they are before any of them is wrapped.
        self._layers = dict(text_model.named_modules())

    def prepare(self, low_ranks: Mapping[str, LowRank]) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns this rank's part of whole matrices, by the layer that computes it."""
        return self._modules.prepare(dict(self._part(name, low_rank) for name, low_rank in low_ranks.items()))

    def place(self, slot: int, prepared: dict[str, tuple[Tensor, Tensor]] | None) -> None:
        """Adds what was prepared, or nothing any more if it is None."""
        self._modules.place(slot, prepared)

    def _part(self, name: str, whole: LowRank) -> tuple[str, LowRank]:
        layer = self._layers[name]
        if isinstance(layer, SplitRows):
            share = self._group.share(whole.down.shape[1])
            return f"{name}.part", LowRank(whole.down[:, share].contiguous(), whole.up)
        num_outputs = whole.up.shape[0]
        if isinstance(layer, GatheredColumns) or layer.out_features == num_outputs:
            return name, whole
        return name, LowRank(whole.down, whole.up[self._group.share(num_outputs)].contiguous())
