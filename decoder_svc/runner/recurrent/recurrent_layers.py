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
from decoder_svc.runner.recurrent.short_convolution import ConvolutionStep, ShortConvolution
from decoder_svc.runner.state_step import PoolSizes, StateStep, state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.text_support import DELTA_NET_TYPE, RECURRENT_TYPES, SHORT_CONVOLUTION_TYPE

# Names of the modules in layers, by the type of the layer.
_MODULES = {DELTA_NET_TYPE: "linear_attn", SHORT_CONVOLUTION_TYPE: "conv"}


def recurrent_layers(text: Any) -> frozenset[int]:
    """Returns the recurrent layers of a text configuration."""
    types = getattr(text, "layer_types", None) or ()
    return frozenset(layer for layer, kind in enumerate(types) if kind in RECURRENT_TYPES)


@dataclass(frozen=True, slots=True)
class RecurrentKernels:
    """A device's kernels; None: operators of PyTorch compute."""

    delta: DeltaStep | None = None
    convolution: ConvolutionStep | None = None


class RecurrentLayers:
    """The recurrent layers of a model, which compute steps from the states in their pools."""

    def __init__(self, text_model: Any, dtype: torch.dtype, kernels: RecurrentKernels) -> None:
        """Replaces the `forward` of the layers' modules in place.

        The kernels compute where they can; otherwise operators of PyTorch and transformers' functions do.
        """
        self.sizes = PoolSizes(0, 0)
        self._layers = []
        for number in sorted(recurrent_layers(text_model.config)):
            layer = text_model.layers[number]
            computed = recurrent_layer(layer, text_model.config.layer_types[number], dtype, kernels)
            getattr(layer, _MODULES[text_model.config.layer_types[number]]).forward = computed
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


def recurrent_layer(
    layer: Any, kind: str, dtype: torch.dtype, kernels: RecurrentKernels
) -> DeltaNet | ShortConvolution:
    """Returns what computes the recurrent module of a layer of this type, in place of the module's `forward`."""
    module = getattr(layer, _MODULES[kind])
    if kind == DELTA_NET_TYPE:
        return DeltaNet(module, dtype, kernels.delta)
    return ShortConvolution(module, dtype, kernels.convolution)
