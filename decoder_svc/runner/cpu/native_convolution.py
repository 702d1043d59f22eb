"""Steps of gated short convolutions by our kernel (native/short_convolution.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from decoder_svc.runner.cpu.attention import DTYPE_NAMES
from decoder_svc.runner.cpu.native_structures import NativeStateStep
from decoder_svc.runner.recurrent.state_pools import StatePool
from decoder_svc.runner.state_step import StateStep
from lookonce.model.kernels.native_library import NativeLibrary

# Channels of a vector, and the largest number of inputs before a token that stay in registers.
LANES, _MOST_KEPT = 16, 7


class _ShortConvolution(ctypes.Structure):
    """The structure of the same name in short_convolution.cpp."""

    _fields_ = (
        ("states", NativeStateStep),
        *((name, ctypes.c_void_p) for name in ("mixed", "windows", "filter", "bias", "output")),
        *((name, ctypes.c_int64) for name in ("num_channels", "window")),
    )


class NativeConvolutionStep:
    """Computes the new tokens of all sequences of a step (ConvolutionStep)."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads

    def can_compute(self, num_channels: int, kernel_size: int, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for filters of this size, and inputs of this type."""
        return num_channels % LANES == 0 and kernel_size - 1 <= _MOST_KEPT and dtype in DTYPE_NAMES

    def __call__(self, mixed: Tensor, pool: StatePool, filters: Tensor, bias: Tensor | None, step: StateStep) -> Tensor:
        """Implements ConvolutionStep.__call__ with one call of the kernel, on all threads."""
        mixed, windows = mixed.contiguous(), pool.windows
        kernel_size, num_channels = filters.shape
        assert mixed.shape == (step.first_tokens[-1], 3 * num_channels), "two gates and values"
        assert windows.shape[1:] == (num_channels, kernel_size - 1)
        assert windows.dtype == mixed.dtype
        assert windows.is_contiguous()
        assert filters.is_contiguous()
        output = torch.empty((len(mixed), num_channels), dtype=mixed.dtype)
        given = _ShortConvolution(
            states=NativeStateStep.of(step),
            mixed=mixed.data_ptr(),
            windows=windows.data_ptr(),
            filter=filters.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            output=output.data_ptr(),
            num_channels=num_channels,
            window=kernel_size - 1,
        )
        function = self._library.function(f"lookonce_short_convolution_{DTYPE_NAMES[mixed.dtype]}")
        function(ctypes.byref(given), ctypes.c_int64(self._num_threads))
        return output
