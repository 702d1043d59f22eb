"""Compares a faster module with the one that it is to replace, on random rows, when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Rows of a trial: more than one tile of every kernel, and not a multiple of one.
NUM_ROWS = 70
# Sizes of a trial's inputs. Small ones show what is added to the input and other epsilons, large ones show limits, as
# in the MLPs of GLM 5. Attention is compared at one size: rounding decides between large scores.
NORM_SCALES = MLP_SCALES = (1.0, 0.01, 30.0)
LAYER_SCALES = (1.0, 0.001)
ATTENTION_SCALES = (1.0,)
# Largest accepted difference, relative to the norm of the output.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random_rows(size: int, weight: Tensor) -> Tensor:
    """Returns `[NUM_ROWS, size]` on the device and in the element type of a weight; the same ones in each call."""
    rows = torch.randn(NUM_ROWS, size, generator=torch.Generator().manual_seed(0))
    return rows.to(weight.device, weight.dtype)


def replacement_problem(
    replaced: Any, replacement: Callable[..., Any], rows: Tensor, scales: Sequence[float], **named: Any
) -> str | None:
    """Calls both with the same rows at all scales. Returns why the second may not replace the first, or None.

    The first scale is 1. Others are left out where the first module overflows.
    """
    try:
        with torch.inference_mode():
            for scale in scales:
                expected, found = replaced(rows * scale, **named), replacement(rows * scale, **named)
                if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                    return "it gives another shape or element type"
                if scale != 1 and not bool(expected.isfinite().all()):
                    continue
                difference = (found.float() - expected.float()).norm()
                # Written with `not` so that NaN counts as a difference.
                if not bool(difference <= _TOLERANCES[expected.dtype] * expected.float().norm()):
                    return "it gives other values than transformers' module"
    except Exception as error:  # compilers and drivers raise many types
        return f"it fails on this device ({type(error).__name__})"
    return None
