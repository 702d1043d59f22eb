"""Quantized weights with random codes."""

from __future__ import annotations

import torch

from lookonce.model.kernels.quantized_weight import CodeForm, QuantizedWeight


def any_codes(num_outputs: int, num_inputs: int, form: CodeForm, group: int, dtype: torch.dtype) -> QuantizedWeight:
    """Codes, scales and offsets as a folder may have them."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator)
    scales, offsets = torch.randn(2, num_outputs, -(-num_inputs // group), generator=generator).bfloat16().float()
    if form is CodeForm.INT4:
        codes &= 15
    elif form is CodeForm.FLOAT8:
        # The two codes that are not numbers are refused when a folder is loaded.
        codes = torch.where(codes & 0x7F == 0x7F, 0x7E, codes)
        offsets = torch.zeros_like(offsets)
    return QuantizedWeight(codes.to(torch.int8), scales, offsets, form, group, dtype)
