"""Steps of gated delta net layers by our kernel (native/delta_net.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from decoder_svc.runner.cpu.attention import DTYPE_NAMES
from decoder_svc.runner.cpu.native_structures import NativeStateStep
from decoder_svc.runner.recurrent.state_pools import StatePool
from decoder_svc.runner.state_step import StateStep
from lookonce.model.kernels.native_library import NativeLibrary

# A row of a state must be whole vectors.
LANES = 16


class _DeltaStep(ctypes.Structure):
    """The structure of the same name in delta_net.cpp."""

    _fields_ = (
        ("states", NativeStateStep),
        *((name, ctypes.c_void_p) for name in ("mixed", "windows", "filter", "kept", "beta", "matrices")),
        *((name, ctypes.c_void_p) for name in ("left_windows", "output")),
        *((name, ctypes.c_int64) for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "window")),
    )


class NativeDeltaStep:
    """Computes the new tokens of all sequences of a step (DeltaStep)."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads

    def can_compute(self, key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for heads of this size, and inputs of this type."""
        return key_dim > 0 and value_dim % LANES == 0 and dtype in DTYPE_NAMES

    def __call__(
        self,
        mixed: Tensor,
        pool: StatePool,
        filters: Tensor,
        decay: Tensor,
        beta: Tensor,
        step: StateStep,
        num_key_heads: int,
    ) -> Tensor:
        """Implements DeltaStep.__call__ with one call of the kernel, on all threads."""
        mixed, windows = mixed.contiguous(), pool.windows_before(step).contiguous()
        filters, kept, beta = (one.float().contiguous() for one in (filters, decay.float().exp().T, beta.T))
        _, num_value_heads, key_dim, value_dim = pool.matrices.shape
        (num_sequences, num_inputs, num_channels), num_snapshots = windows.shape, len(step.snapshot_states)
        assert num_channels == 2 * num_key_heads * key_dim + num_value_heads * value_dim, "queries, keys and values"
        assert mixed.shape[1] == num_channels
        assert kept.shape == beta.shape
        assert len(mixed) == len(decay) == step.first_tokens[-1]
        assert windows.dtype == mixed.dtype
        assert filters.shape == (num_inputs + 1, num_channels)
        left = torch.empty((num_sequences + num_snapshots, num_inputs, num_channels), dtype=mixed.dtype)
        output = torch.empty((num_value_heads, len(mixed), value_dim), dtype=torch.float32)
        given = _DeltaStep(
            states=NativeStateStep.of(step),
            mixed=mixed.data_ptr(),
            windows=windows.data_ptr(),
            filter=filters.data_ptr(),
            kept=kept.data_ptr(),
            beta=beta.data_ptr(),
            matrices=pool.matrices.data_ptr(),
            left_windows=left.data_ptr(),
            output=output.data_ptr(),
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            window=num_inputs,
        )
        function = self._library.function(f"lookonce_delta_step_{DTYPE_NAMES[mixed.dtype]}")
        function(ctypes.byref(given), ctypes.c_int64(self._num_threads))
        pool.write_left_windows(step, left)
        return output.transpose(0, 1)
