"""Steps of Mamba2 layers by our kernel (native/mamba2.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from decoder_svc.runner.cpu.attention import DTYPE_NAMES
from decoder_svc.runner.cpu.native_structures import NativeStateStep
from decoder_svc.runner.recurrent.mamba2 import ScanWeights
from decoder_svc.runner.recurrent.state_pools import StatePool
from decoder_svc.runner.state_step import StateStep
from lookonce.model.kernels.native_library import NativeLibrary

# A row of a state must be whole vectors.
LANES = 16


class _ScanStep(ctypes.Structure):
    """The structure of the same name in mamba2.cpp."""

    _fields_ = (
        ("states", NativeStateStep),
        *((name, ctypes.c_void_p) for name in ("mixed", "time_steps", "gates", "windows", "filter", "bias", "rates")),
        *((name, ctypes.c_void_p) for name in ("skips", "step_bias", "matrices", "left_windows", "output")),
        *((name, ctypes.c_int64) for name in ("num_groups", "num_heads", "state_size", "head_dim")),
        *((name, ctypes.c_int64) for name in ("window", "mixed_stride", "steps_stride", "gates_stride")),
    )


class NativeScanStep:
    """Computes the new tokens of all sequences of a step (ScanStep)."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads

    def can_compute(self, head_dim: int, state_size: int, kernel_size: int, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for heads of this size, and inputs of this type. Filters have any size."""
        return head_dim % LANES == 0 and state_size > 0 and kernel_size > 0 and dtype in DTYPE_NAMES

    def __call__(
        self, mixed: Tensor, time_steps: Tensor, gates: Tensor, pool: StatePool, weights: ScanWeights, step: StateStep
    ) -> Tensor:
        """Implements ScanStep.__call__ with one call of the kernel, on all threads."""
        windows = pool.windows_before(step).contiguous()
        _, num_heads, state_size, head_dim = pool.matrices.shape
        (num_sequences, num_inputs, num_channels), num_snapshots = windows.shape, len(step.snapshot_states)
        assert num_channels == num_heads * head_dim + 2 * weights.num_groups * state_size, "values, keys and queries"
        assert num_heads % weights.num_groups == 0
        assert mixed.shape == (step.first_tokens[-1], num_channels)
        assert time_steps.shape == (len(mixed), num_heads)
        assert gates.shape == (len(mixed), num_heads * head_dim)
        assert mixed.stride(1) == time_steps.stride(1) == gates.stride(1) == 1
        assert mixed.dtype == time_steps.dtype == gates.dtype == windows.dtype
        assert weights.filters.shape == (num_inputs + 1, num_channels)
        given = (weights.filters, weights.rates, weights.skips, weights.step_bias)
        assert all(one.is_contiguous() and one.dtype is torch.float32 for one in given)
        left = torch.empty((num_sequences + num_snapshots, num_inputs, num_channels), dtype=mixed.dtype)
        output = torch.empty((len(mixed), num_heads, head_dim), dtype=torch.float32)
        arguments = _ScanStep(
            states=NativeStateStep.of(step),
            mixed=mixed.data_ptr(),
            time_steps=time_steps.data_ptr(),
            gates=gates.data_ptr(),
            windows=windows.data_ptr(),
            filter=weights.filters.data_ptr(),
            bias=None if weights.bias is None else weights.bias.data_ptr(),
            rates=weights.rates.data_ptr(),
            skips=weights.skips.data_ptr(),
            step_bias=weights.step_bias.data_ptr(),
            matrices=pool.matrices.data_ptr(),
            left_windows=left.data_ptr(),
            output=output.data_ptr(),
            num_groups=weights.num_groups,
            num_heads=num_heads,
            state_size=state_size,
            head_dim=head_dim,
            window=num_inputs,
            mixed_stride=mixed.stride(0),
            steps_stride=time_steps.stride(0),
            gates_stride=gates.stride(0),
        )
        function = self._library.function(f"lookonce_scan_step_{DTYPE_NAMES[mixed.dtype]}")
        function(ctypes.byref(arguments), ctypes.c_int64(self._num_threads))
        pool.write_left_windows(step, left)
        return output
