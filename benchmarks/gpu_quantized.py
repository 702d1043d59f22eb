"""Checks and times products with quantized weights on a device, for `benchmarks.gpu`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_checks import Check
from benchmarks.gpu_peers import seconds_of
from decoder_svc.runner.cuda.device_weight import DeviceWeight
from decoder_svc.runner.cuda.quantized_layers import DeviceLinear
from lookonce.model.kernels.quantized_weight import CodeForm, QuantizedWeight, quantized

# Outputs and inputs of layers of the language models of Qwen2-VL-2B and Qwen2.5-VL-7B.
_LAYERS = ((2048, 1536), (17_920, 1536), (4608, 3584), (37_888, 3584), (3584, 18_944))
# The last one is multiplied with an expanded weight.
_ROWS = (1, 8, 16, 32, 64, 128, 512)
# Calls in a row, whose kernels the device runs without waiting for the host.
_CALLS = 20
_LARGEST_DIFFERENCE = 1e-2
_DTYPE = torch.bfloat16


def quantized_cells(device: torch.device) -> Iterator[Check | dict[str, Any]]:
    """Yields a check for each layer and form in bfloat16, and the times of products with codes and with whole weights.

    Raises ImportError without Triton.
    """
    for num_outputs, num_inputs in _LAYERS:
        generator = torch.Generator(device).manual_seed(0)
        weight = torch.randn(num_outputs, num_inputs, generator=generator, device=device).to(_DTYPE)
        for form in CodeForm:
            codes = _codes(weight, form)
            layer: Any = DeviceLinear(DeviceWeight.of(codes, device), None, _num_processors(device))
            whole = codes.dequantized()
            differences = []
            times = []
            for num_rows in _ROWS:
                rows = torch.randn(num_rows, num_inputs, generator=generator, device=device).to(_DTYPE)
                wanted = F.linear(rows, whole).float()
                differences.append(float((layer(rows).float() - wanted).norm() / wanted.norm()))
                times.append(
                    {
                        "layer": f"{num_outputs} × {num_inputs}", "form": form.name, "rows": num_rows,
                        "codes_s": _seconds(functools.partial(layer, rows), device),
                        "whole_s": _seconds(functools.partial(F.linear, rows, whole), device),
                        "num_bytes": layer.weight_codes.nbytes,
                    }
                )  # fmt: skip
            name = f"products with codes against the whole weight: {form.name}, {num_outputs} × {num_inputs}"
            told = ", ".join(f"{difference:.2g}" for difference in differences)
            # NaN is not less than anything.
            has_passed = all(difference <= _LARGEST_DIFFERENCE for difference in differences)
            yield Check(name, has_passed, f"{told} of the results; {_LARGEST_DIFFERENCE:g} passes")
            yield from times


def _codes(weight: torch.Tensor, form: CodeForm) -> QuantizedWeight:
    if form is not CodeForm.FLOAT8:
        return quantized(weight, form.bits)
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 448
    codes = (weight.float() / scales).to(torch.float8_e4m3fn).view(torch.int8)
    return QuantizedWeight(codes, scales, torch.zeros_like(scales), form, weight.shape[1], weight.dtype)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _seconds(product: functools.partial[torch.Tensor], device: torch.device) -> float:
    def several() -> None:
        for _ in range(_CALLS):
            product()

    return statistics.median(seconds_of(several, device)) / _CALLS
