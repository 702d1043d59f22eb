"""Checks and times recurrent layers on a device, for `benchmarks.gpu`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_checks import Check
from benchmarks.gpu_peers import seconds_of
from benchmarks.recurrent_steps import has_kernel, move, one_layer_models, step_of
from decoder_svc.runner.recurrent.kernel_trial import wrong_kernel_reason
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels

# (sequences, new tokens of each).
_STEPS = ((1, 1), (8, 1), (64, 1), (1, 256), (1, 2048))
_DTYPE = torch.bfloat16
# Calls in a row, whose kernels the device runs without waiting for the host.
_CALLS = 20


def recurrent_cells(
    device: torch.device, hidden_size: int = 1024, *, dtype: torch.dtype = _DTYPE, num_calls: int = _CALLS
) -> Iterator[Check | dict[str, Any]]:
    """Yields a check of each kind of layer, and the times of steps with kernels and with PyTorch's operators.

    Raises ImportError without Triton.
    """
    from decoder_svc.runner.cuda.triton_recurrent import TritonConvolutionStep, TritonDeltaStep, TritonScanStep

    kernels = RecurrentKernels(TritonDeltaStep(), TritonConvolutionStep(), TritonScanStep())
    for name, text_model in one_layer_models(hidden_size).items():
        move(text_model, device, dtype)
        assert has_kernel(text_model, dtype, kernels), f"no kernel computes the layer: {name}"
        with torch.inference_mode():
            reason = wrong_kernel_reason(text_model, dtype, kernels, device)
            yield Check(f"kernels against PyTorch's operators: {name}", reason is None, reason or "equal")
            for num_sequences, num_tokens in _STEPS:
                hidden = torch.randn(1, num_sequences * num_tokens, hidden_size).to(device, dtype)
                seconds = {}
                for form, each in (("kernels_s", kernels), ("operators_s", RecurrentKernels())):
                    compute = step_of(text_model, dtype, each, num_sequences, num_tokens, device)
                    seconds[form] = _seconds(functools.partial(compute, hidden), device, num_calls)
                yield {"layer": name, "sequences": num_sequences, "tokens": num_tokens} | seconds


def _seconds(step: functools.partial[torch.Tensor], device: torch.device, num_calls: int) -> float:
    def several() -> None:
        for _ in range(num_calls):
            step()

    return statistics.median(seconds_of(several, device)) / num_calls
