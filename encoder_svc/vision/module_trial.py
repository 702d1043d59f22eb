"""Compares a faster module with the one that it is to replace, on random rows, when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Rows of a trial: more than one tile of every kernel, and not a multiple of one.
NUM_ROWS = 70
# Largest accepted difference, relative to the norm of the output.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random_rows(size: int, weight: Tensor) -> Tensor:
    """Returns `[NUM_ROWS, size]` on the device and in the element type of a weight; the same ones in each call."""
    rows = torch.randn(NUM_ROWS, size, generator=torch.Generator().manual_seed(0))
    return rows.to(weight.device, weight.dtype)


def replacement_problem(replaced: Any, replacement: Callable[..., Any], *inputs: Any, **named: Any) -> str | None:
    """Calls both with the same arguments. Returns why the second may not replace the first, or None if it may."""
    try:
        with torch.inference_mode():
            expected, found = replaced(*inputs, **named), replacement(*inputs, **named)
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return "it gives another shape or element type"
        difference = (found.float() - expected.float()).norm()
        # Written with `not` so that NaN counts as a difference.
        if not bool(difference <= _TOLERANCES[expected.dtype] * expected.float().norm()):
            return "it gives other values than transformers' module"
    except Exception as error:  # compilers and drivers raise many types
        return f"it fails on this device ({type(error).__name__})"
    return None
