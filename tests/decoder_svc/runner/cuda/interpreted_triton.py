"""Our Triton kernel in Triton's interpreter, which runs it on the CPU, one program after the other."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch for CUDA")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU, so kernels are compiled for it: `make bench-gpu` tests them", allow_module_level=True)

from decoder_svc.runner.cuda.triton_attention import TritonBackend, num_key_splits, tile_sizes

# Numbers of multiprocessors: so few that keys are not divided, and so many that they are.
FEW, MANY = 1, 132


def interpreted(num_processors: int = FEW) -> TritonBackend:
    """Returns a backend whose pools are on the CPU."""
    return TritonBackend(num_processors)


__all__ = ["FEW", "MANY", "interpreted", "num_key_splits", "tile_sizes"]
