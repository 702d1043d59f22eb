"""A kernel that stores what a function of `triton_recurrent.py` returns."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from tests.decoder_svc.runner.cuda.interpreted_triton import triton_recurrent  # isort: skip  # Triton must be found first

import triton
import triton.language as tl

softplus = triton_recurrent._softplus


@triton.jit
def report_softplus(numbers, output, NUM: tl.constexpr):
    """Stores softplus of some numbers."""
    places = tl.arange(0, NUM)
    tl.store(output + places, softplus(tl.load(numbers + places)))
