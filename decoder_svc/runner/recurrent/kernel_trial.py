"""Compares a device's kernels for recurrent layers with PyTorch's operators, on a layer of each kind of a model.

A kernel that computes other numbers on this device, or cannot be compiled for it, is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, SdpaBackend, forward_context
from decoder_svc.runner.recurrent.recurrent_layers import (
    RecurrentKernels,
    RecurrentLayer,
    lone_step,
    recurrent_layer,
)
from decoder_svc.runner.state_step import PoolSizes
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.text_support import recurrent_kinds

logger = logging.getLogger(__name__)

_POOLS = PoolSizes(4, 3)
# Two steps: states that begin with zeros, with those of the step before, and with a snapshot; new tokens of each.
_STEPS: Sequence[tuple[tuple[StateUse, int, int], ...]] = (
    ((StateUse(0, None, ((2, 0), (5, 1))), 0, 5), (StateUse(1, None, ()), 0, 1), (StateUse(2, None, ()), 0, 3)),
    ((StateUse(1, None, ((2, 2),)), 1, 1), (StateUse(0, None, ()), 5, 7), (StateUse(3, 0, ()), 2, 4)),
)
_SEED = 5
_NO_ATTENTION: AttentionBackend = SdpaBackend()
# Largest accepted difference, relative to the largest number.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def wrong_kernel_reason(
    text_model: Any, dtype: torch.dtype, kernels: RecurrentKernels, device: torch.device
) -> str | None:
    """Returns why the kernels cannot be used for a model whose layers are on the device, or None if they can."""
    kinds = recurrent_kinds(text_model.config)
    firsts = {kinds[number]: number for number in sorted(kinds, reverse=True)}
    for kind, number in firsts.items():
        wanted, found = (
            recurrent_layer(text_model.layers[number], kind, dtype, each) for each in (RecurrentKernels(), kernels)
        )
        try:
            with torch.inference_mode():
                are_equal = _are_equal(
                    *(_results(each, text_model.config.hidden_size, device) for each in (found, wanted))
                )
        except Exception as error:  # compilers and drivers raise many types
            logger.debug("kernels for recurrent layers failed their trial", exc_info=True)
            return f"they fail on this device ({type(error).__name__})"
        if not are_equal:
            return f"they compute other numbers on this device, in layers of the kind {kind.value!r}"
    return None


def _are_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    for one, other in zip(found, wanted, strict=True):
        difference = (one.float() - other.float()).abs().max()
        # A comparison with NaN is false.
        if not bool(difference <= _TOLERANCES[one.dtype] * other.float().abs().max()):
            return False
    return True


def _results(layer: RecurrentLayer, hidden_size: int, device: torch.device) -> list[Tensor]:
    """Returns the outputs of both steps, and the states behind them."""
    pool = layer.pool
    pool.allocate(_POOLS, device)
    generator = torch.Generator().manual_seed(_SEED)
    outputs = []
    for step in _STEPS:
        uses, starts, lengths = zip(*step, strict=True)
        hidden = torch.randn(1, sum(lengths), hidden_size, generator=generator)
        metadata = lone_step(uses, starts, lengths, _POOLS, lambda numbers: numbers.to(device))
        with forward_context(_NO_ATTENTION, metadata):
            outputs.append(layer(hidden.to(pool.shape.dtype).to(device)))
    # The last state takes what nobody reads.
    states = [each[:-1] for each in (pool.matrices, pool.windows) if each.numel()]
    return [*outputs, *states]
