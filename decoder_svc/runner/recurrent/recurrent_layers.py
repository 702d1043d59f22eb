"""The recurrent layers of a model: which they are, and their modules computed from the states in their pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from decoder_svc.runner.recurrent.delta_net import DeltaStep, install_delta_net
from decoder_svc.runner.recurrent.short_convolution import install_short_convolution
from decoder_svc.runner.recurrent.state_pools import StatePool
from lookonce.model.text_support import DELTA_NET_TYPE, RECURRENT_TYPES

# The name of the module in a layer of each type.
_DELTA_NET, _SHORT_CONVOLUTION = "linear_attn", "conv"


def recurrent_layers(text: Any) -> frozenset[int]:
    """Returns the recurrent layers of a text configuration."""
    types = getattr(text, "layer_types", None) or ()
    return frozenset(layer for layer, kind in enumerate(types) if kind in RECURRENT_TYPES)


class RecurrentLayers:
    """The recurrent layers of a model, which compute steps from the states in their pools."""

    def __init__(self, text_model: Any, dtype: torch.dtype, step: DeltaStep | None = None) -> None:
        """Replaces the `forward` of the layers' modules in place.

        `step` computes the tokens of delta nets where it can; otherwise transformers' functions do.
        """
        self._pools: Mapping[int, StatePool] = {
            layer: _install(text_model.layers[layer], text_model.config.layer_types[layer], dtype, step)
            for layer in sorted(recurrent_layers(text_model.config))
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of one state in all layers."""
        return sum(pool.shape.num_bytes for pool in self._pools.values())

    def allocate(self, num_slots: int, num_snapshots: int, device: torch.device) -> None:
        """Allocates the states of all layers."""
        for pool in self._pools.values():
            pool.allocate(num_slots, num_snapshots, device)


def _install(layer: Any, kind: str, dtype: torch.dtype, step: DeltaStep | None) -> StatePool:
    if kind == DELTA_NET_TYPE:
        return install_delta_net(getattr(layer, _DELTA_NET), dtype, step)
    return install_short_convolution(getattr(layer, _SHORT_CONVOLUTION), dtype)
