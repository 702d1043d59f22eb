"""Single tokens of gated delta net layers by our kernel (native/delta_net.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from decoder_svc.runner.recurrent.state_pools import MatrixPlaces
from lookonce.model.kernels.native_library import NativeLibrary

# A row of a state must be whole vectors.
LANES = 16


class _DeltaStep(ctypes.Structure):
    """The structure of the same name in delta_net.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mixed", "decay", "beta", "matrices", "sources", "targets", "output")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_sequences", "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        ),
    )


class NativeDeltaStep:
    """Computes one token of each sequence (DeltaStep)."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self._function = library.function("lookonce_delta_step")
        self._num_threads = num_threads

    def can_compute(self, key_dim: int, value_dim: int) -> bool:
        """Whether the heads of a layer have a size for which there is a kernel."""
        return key_dim > 0 and value_dim % LANES == 0

    def __call__(self, mixed: Tensor, decay: Tensor, beta: Tensor, places: MatrixPlaces, num_key_heads: int) -> Tensor:
        """Changes the states in place, and returns `[num_sequences, value_heads, value_dim]`, float32."""
        mixed, decay, beta = (one.float().contiguous() for one in (mixed, decay, beta))
        _, num_value_heads, key_dim, value_dim = places.matrices.shape
        output = torch.empty((len(mixed), num_value_heads, value_dim), dtype=torch.float32)
        assert mixed.shape[1] == 2 * num_key_heads * key_dim + num_value_heads * value_dim, "queries, keys and values"
        step = _DeltaStep(
            mixed=mixed.data_ptr(),
            decay=decay.data_ptr(),
            beta=beta.data_ptr(),
            matrices=places.matrices.data_ptr(),
            sources=places.sources.data_ptr(),
            targets=places.targets.data_ptr(),
            output=output.data_ptr(),
            num_sequences=len(mixed),
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
        self._function(ctypes.byref(step), ctypes.c_int64(self._num_threads))
        return output
