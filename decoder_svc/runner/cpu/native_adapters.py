"""Adapters in the layout of the native stack: for each layer, one pair of matrices for each of its four products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoder_svc.runner.adapters.adapter_table import AdapterTable
from decoder_svc.runner.adapters.low_rank import LowRank
from decoder_svc.runner.cpu.native_structures import LayerAdapter, LowRankMatrices, StepAdapters
from lookonce.errors import ModelFolderError
from lookonce.model.kernels.native_linear import PANEL_OUTPUTS

# Linear layers of transformers that the stack computes as one, and where their outputs alternate in groups of 16.
_PRODUCTS = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), False),
    (("self_attn.o_proj",), False),
    (("mlp.gate_proj", "mlp.up_proj"), True),
    (("mlp.down_proj",), False),
)
_LANES = 16
# Rows of `down` that the stack multiplies at once. Rows of zeros are added.
_RANKS_AT_ONCE = 4


class _Prepared(NamedTuple):
    """The structures of an adapter, and the tensors that they point into."""

    layers: list[LayerAdapter]
    tensors: list[Tensor]


class NativeAdapters:
    """The adapters of a table for one stack (AdaptedModel)."""

    def __init__(self, table: AdapterTable, sizes: Sequence[Mapping[str, tuple[int, int]]], dtype: torch.dtype) -> None:
        """`sizes` has inputs and outputs of each linear layer, by its name in the layer, for each layer.

        `dtype` is the element type of the stack.
        """
        self._table = table
        self._sizes = sizes
        self._dtype = dtype
        self._slots: list[_Prepared] = []
        self._layers = (LayerAdapter * 0)()
        self._max_rank = 0

    def prepare(self, low_ranks: Mapping[str, LowRank]) -> _Prepared:
        """Converts what an adapter adds into the stack's layout."""
        places = {f"layers.{index}.{name}" for index, sizes in enumerate(self._sizes) for name in sizes}
        if not places.issuperset(low_ranks):
            raise ModelFolderError(f"the native kernels have no place for {min(low_ranks.keys() - places)}")
        tensors: list[Tensor] = []
        layers = [self._layer(low_ranks, index, each, tensors) for index, each in enumerate(self._sizes)]
        return _Prepared(layers, tensors)

    def place(self, slot: int, prepared: _Prepared | None) -> None:
        """Adds an adapter to those of the next steps."""
        self._slots[slot : slot + 1] = [self.prepare({}) if prepared is None else prepared]
        everything = [layer for each in self._slots for layer in each.layers]
        self._layers = (LayerAdapter * len(everything))(*everything)
        self._max_rank = max(low.rank for layer in everything for low in layer.linears)

    def step(self, num_tokens: int) -> tuple[StepAdapters, object] | None:
        """Returns the adapters of the step's tokens, and an object that must live as long; None without any."""
        if not self._table.tokens or not self._max_rank:
            return None
        slots = np.full(num_tokens, -1, dtype=np.int32)
        for start, stop, slot in self._table.tokens:
            slots[start:stop] = slot
        return StepAdapters(self._layers, slots.ctypes.data, len(self._sizes), self._max_rank), slots

    def _layer(
        self, low_ranks: Mapping[str, LowRank], index: int, sizes: Mapping[str, tuple[int, int]], tensors: list[Tensor]
    ) -> LayerAdapter:
        found = []
        for names, alternates in _PRODUCTS:
            parts = [low_ranks.get(f"layers.{index}.{name}") for name in names]
            matrices = _product(parts, [sizes[name] for name in names], alternates=alternates)
            if matrices is None:
                found.append(LowRankMatrices(None, None, 0))
                continue
            down, panels = (matrix.to(self._dtype) for matrix in matrices)
            tensors += (down, panels)
            found.append(LowRankMatrices(down.data_ptr(), panels.data_ptr(), len(down)))
        return LayerAdapter((LowRankMatrices * len(_PRODUCTS))(*found))


def _product(
    parts: Sequence[LowRank | None], sizes: Sequence[tuple[int, int]], *, alternates: bool
) -> tuple[Tensor, Tensor] | None:
    """Joins the matrices of linear layers that the stack computes as one; None if nothing is added to them."""
    rank = sum(len(part.down) for part in parts if part is not None)
    if not rank:
        return None
    rank += -rank % _RANKS_AT_ONCE
    # Inputs and, where they alternate, outputs are padded to whole vectors, as the stack's weights are.
    down = torch.zeros(rank, -(-sizes[0][0] // _LANES) * _LANES)
    ups, first = [], 0
    for part, (_, num_outputs) in zip(parts, sizes, strict=True):
        up = torch.zeros(-(-num_outputs // _LANES) * _LANES if alternates else num_outputs, rank)
        if part is not None:
            stop = first + len(part.down)
            down[first:stop, : part.down.shape[1]] = part.down
            up[:num_outputs, first:stop] = part.up
            first = stop
        ups.append(up)
    joined = torch.cat(ups)
    if alternates:
        joined = torch.stack([up.unflatten(0, (-1, _LANES)) for up in ups], dim=1).flatten(0, 2)
    padded = F.pad(joined, (0, 0, 0, -len(joined) % PANEL_OUTPUTS))
    return down, padded.unflatten(0, (-1, PANEL_OUTPUTS)).transpose(1, 2).contiguous()
