"""The recurrent layers of a model: which they are, and their modules computed from the states in their pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoder_svc.runner.input_batch import FlatInputs
from decoder_svc.runner.recurrent.delta_net import DeltaStep, install_delta_net
from decoder_svc.runner.recurrent.short_convolution import ConvolutionStep, install_short_convolution
from decoder_svc.runner.recurrent.state_pools import StatePool
from decoder_svc.runner.recurrent.state_step import PoolSizes, StateStep, state_arrays
from lookonce.model.text_support import DELTA_NET_TYPE, RECURRENT_TYPES

# The name of the module in a layer of each type.
_DELTA_NET, _SHORT_CONVOLUTION = "linear_attn", "conv"


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
        self._pools: Mapping[int, StatePool] = {
            layer: _install(text_model.layers[layer], text_model.config.layer_types[layer], dtype, kernels)
            for layer in sorted(recurrent_layers(text_model.config))
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of one state in all layers."""
        return sum(pool.shape.num_bytes for pool in self._pools.values())

    def allocate(self, sizes: PoolSizes, device: torch.device) -> None:
        """Allocates the states of all layers."""
        self.sizes = sizes
        for pool in self._pools.values():
            pool.allocate(sizes, device)

    def step(self, flat: FlatInputs, move: Callable[[Tensor], Tensor]) -> StateStep:
        """Returns where the states of a step are."""
        return StateStep.of(state_arrays(flat.states, flat.kv_lens, flat.query_lens, self.sizes), move)


def _install(layer: Any, kind: str, dtype: torch.dtype, kernels: RecurrentKernels) -> StatePool:
    if kind == DELTA_NET_TYPE:
        return install_delta_net(getattr(layer, _DELTA_NET), dtype, kernels.delta)
    return install_short_convolution(getattr(layer, _SHORT_CONVOLUTION), dtype, kernels.convolution)
