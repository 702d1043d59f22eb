"""The recurrent layers of a model: which they are, and their modules computed from the states in their pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata
from decoder_svc.runner.input_batch import FlatInputs
from decoder_svc.runner.recurrent.delta_net import DeltaNet, DeltaStep
from decoder_svc.runner.recurrent.mamba2 import Mamba2, ScanStep
from decoder_svc.runner.recurrent.short_convolution import ConvolutionStep, ShortConvolution
from decoder_svc.runner.state_step import PoolSizes, StateStep, state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.text_support import RecurrentKind, recurrent_kinds

# Names of the modules in layers.
_MODULES = {
    RecurrentKind.DELTA_NET: "linear_attn",
    RecurrentKind.SHORT_CONVOLUTION: "conv",
    RecurrentKind.MAMBA2: "mixer",
}
RecurrentLayer = DeltaNet | ShortConvolution | Mamba2


@dataclass(frozen=True, slots=True)
class RecurrentKernels:
    """A device's kernels; None: operators of PyTorch compute."""

    delta: DeltaStep | None = None
    convolution: ConvolutionStep | None = None
    scan: ScanStep | None = None


class RecurrentLayers:
    """The recurrent layers of a model, which compute steps from the states in their pools."""

    def __init__(self, text_model: Any, dtype: torch.dtype, kernels: RecurrentKernels) -> None:
        """Replaces the `forward` of the layers' modules in place.

        The kernels compute where they can; otherwise operators of PyTorch and transformers' functions do.
        """
        self.sizes = PoolSizes(0, 0)
        self._layers = []
        for number, kind in recurrent_kinds(text_model.config).items():
            layer = text_model.layers[number]
            computed = recurrent_layer(layer, kind, dtype, kernels)
            getattr(layer, _MODULES[kind]).forward = computed
            self._layers.append(computed)

    @property
    def have_kernels(self) -> bool:
        """Whether kernels compute all layers, which read no tensor on the host."""
        return all(layer.has_kernel for layer in self._layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state in all layers."""
        return sum(layer.pool.shape.num_bytes for layer in self._layers)

    def allocate(self, sizes: PoolSizes, device: torch.device) -> None:
        """Allocates the states of all layers."""
        self.sizes = sizes
        for layer in self._layers:
            layer.pool.allocate(sizes, device)

    def step(self, flat: FlatInputs, move: Callable[[Tensor], Tensor]) -> StateStep:
        """Returns where the states of a step are."""
        return StateStep.of(state_arrays(flat.states, flat.kv_lens, flat.query_lens, self.sizes), move)


def lone_step(
    uses: Sequence[StateUse],
    starts: Sequence[int],
    lengths: Sequence[int],
    sizes: PoolSizes,
    move: Callable[[Tensor], Tensor],
) -> AttentionMetadata:
    """Returns the metadata of a step for recurrent layers alone, as trials and measurements of them need it.

    `starts` are the indexes of the sequences' first new tokens, `lengths` the numbers of new tokens.
    """
    kv_lens = tuple(start + length for start, length in zip(starts, lengths, strict=True))
    return AttentionMetadata(
        full=BlockMetadata(torch.empty(0), (), ()),
        sliding=None,
        query_lens=tuple(lengths),
        kv_lens=kv_lens,
        mutual_spans=((),) * len(uses),
        is_mutual_beyond_window=False,
        states=tuple(uses),
        state_step=StateStep.of(state_arrays(uses, kv_lens, lengths, sizes), move),
    )


def recurrent_layer(layer: Any, kind: RecurrentKind, dtype: torch.dtype, kernels: RecurrentKernels) -> RecurrentLayer:
    """Returns what computes the recurrent module of a layer of this kind, in place of the module's `forward`."""
    module = getattr(layer, _MODULES[kind])
    if kind is RecurrentKind.DELTA_NET:
        return DeltaNet(module, dtype, kernels.delta)
    if kind is RecurrentKind.SHORT_CONVOLUTION:
        return ShortConvolution(module, dtype, kernels.convolution)
    return Mamba2(module, dtype, kernels.scan)
