"""Keys and values of 8 bits, written down a second time: codes with a scale for each head and token."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from tests.decoder_svc.runner.attention_reference import expected
from tests.decoder_svc.runner.attention_step import TOLERANCES, Step

_LARGEST_CODE = 127


def scales_of(numbers: Tensor) -> Tensor:
    """Returns `[…, 1]` float32 scales of the last dimension; NaN where a number is infinite or NaN."""
    scales = numbers.float().abs().amax(dim=-1, keepdim=True) / _LARGEST_CODE
    return torch.where(scales.isinf(), torch.nan, scales)


def codes_of(numbers: Tensor) -> Tensor:
    """Returns codes int8, with 1 in the place of what is no number."""
    scales = scales_of(numbers)
    scaled = numbers.float() * torch.where(scales > 0, 1 / scales, 0.0)
    nearest = (scaled + torch.where(scaled < 0, -0.5, 0.5)).trunc()
    return torch.nan_to_num(nearest, nan=1.0, posinf=1.0, neginf=1.0).to(torch.int8)


def rounded(numbers: Tensor) -> Tensor:
    """Returns what is left of the numbers, in float32."""
    return codes_of(numbers) * scales_of(numbers)


def check_rounded(step: Step, options: LayerOptions, *, is_mutual_beyond_window: bool = False) -> None:
    """Asserts that a step on rounded pools gives the reference's result over rounded keys and values."""
    tolerance = TOLERANCES[step.contents[0].query.dtype]
    outputs = step.run(options, is_mutual_beyond_window=is_mutual_beyond_window)
    for chunk, contents, output in zip(step.chunks, step.contents, outputs, strict=True):
        exact = replace(contents, keys=rounded(contents.keys), values=rounded(contents.values))
        wanted = expected(chunk, exact, options, is_mutual_beyond_window=is_mutual_beyond_window)
        torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)
