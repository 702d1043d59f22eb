"""Gated short convolutions (LFM2, arXiv:2511.23404) on the sequences of a step, in place of the modules' own `forward`.

Such a layer has no matrix. Its state is the last inputs of the convolution. All tokens of a step are computed at once:
in front of each sequence's tokens lie the inputs from its state.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from decoder_svc.runner.attention import current_step
from decoder_svc.runner.recurrent.state_pools import StatePool, StateShape
from decoder_svc.runner.recurrent.window_sums import window_sums
from decoder_svc.runner.state_step import StateStep


class ConvolutionStep(Protocol):
    """A kernel for the new tokens of several sequences."""

    def can_compute(self, num_channels: int, kernel_size: int, dtype: torch.dtype) -> bool:
        """Whether it computes filters of this size, from inputs of this type."""
        ...

    def __call__(self, mixed: Tensor, pool: StatePool, filters: Tensor, bias: Tensor | None, step: StateStep) -> Tensor:
        """Changes the windows in the pool. Returns the outputs `[num_tokens, channels]`, of the type of `mixed`.

        `mixed` are the gates in front of the convolution, those behind it, and values, `[num_tokens, 3 · channels]`.
        `filters` are `[kernel_size, channels]`, and `bias` `[channels]`, both float32.
        """
        ...  # fmt: skip


class ShortConvolution:
    """One layer: computes what its module's `forward` would, from the states in a pool."""

    def __init__(self, module: Any, dtype: torch.dtype, kernel: ConvolutionStep | None) -> None:
        """Without a kernel, operators of PyTorch compute."""
        num_channels, _, num_taps = module.conv.weight.shape
        self._module = module
        self.pool = StatePool(StateShape(matrix=(0, 0, 0), window=(num_channels, num_taps - 1), dtype=dtype))
        self.has_kernel = kernel is not None and kernel.can_compute(num_channels, num_taps, dtype)
        self._kernel = kernel if kernel is not None and self.has_kernel else None
        # [kernel_size, channels]
        self._filters = module.conv.weight[:, 0].T.float().contiguous()
        self._bias = None if module.conv.bias is None else module.conv.bias.float()

    def __call__(self, hidden_states: Tensor, **_arguments: Any) -> Tensor:
        """Takes and returns `[1, num_tokens, hidden_size]`."""
        _, metadata = current_step()
        assert metadata.state_step is not None, "the runner gives it for a model with recurrent layers"
        mixed = self._module.in_proj(hidden_states)[0]
        compute = convolve if self._kernel is None else self._kernel
        output: Tensor = self._module.out_proj(
            compute(mixed, self.pool, self._filters, self._bias, metadata.state_step)[None]
        )
        return output


def convolve(mixed: Tensor, pool: StatePool, filters: Tensor, bias: Tensor | None, step: StateStep) -> Tensor:
    """Implements `ConvolutionStep` with operators of PyTorch. Sums are float32, in one order for any step."""
    gate_before, gate_after, values = mixed.chunk(3, dim=-1)
    inputs = gate_before * values
    return gate_after * window_sums(inputs, pool, filters, bias, step).to(inputs.dtype)
