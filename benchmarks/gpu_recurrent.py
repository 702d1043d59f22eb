"""Checks and times recurrent layers on a device, for `benchmarks.gpu`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Lfm2Config, Qwen3_5TextConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from benchmarks.gpu_checks import Check
from benchmarks.gpu_peers import seconds_of
from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata, SdpaBackend, forward_context
from decoder_svc.runner.recurrent.kernel_trial import wrong_kernel_reason
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels, recurrent_layer
from decoder_svc.runner.state_step import PoolSizes, StateStep, state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse

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
    from decoder_svc.runner.cuda.triton_recurrent import TritonConvolutionStep, TritonDeltaStep

    kernels = RecurrentKernels(TritonDeltaStep(), TritonConvolutionStep())
    for name, text_model in _models(hidden_size).items():
        (layer,) = text_model.layers
        for module in vars(layer).values():
            module.to(device, dtype)
        with torch.inference_mode():
            reason = wrong_kernel_reason(text_model, dtype, kernels, device)
            yield Check(f"kernels against PyTorch's operators: {name}", reason is None, reason or "equal")
            kind = text_model.config.layer_types[0]
            for num_sequences, num_tokens in _STEPS:
                seconds = {}
                for form, each in (("kernels_s", kernels), ("operators_s", RecurrentKernels())):
                    computed = recurrent_layer(layer, kind, dtype, each)
                    step = _step(computed, num_sequences, num_tokens, hidden_size, device)
                    seconds[form] = _seconds(step, device, num_calls)
                yield {"layer": name, "sequences": num_sequences, "tokens": num_tokens} | seconds


def _models(hidden_size: int) -> dict[str, Any]:
    """Returns models of one layer each, with Qwen3.5's and LFM2's sizes of heads and filters."""
    torch.manual_seed(0)
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), hidden_size // 64)
    delta = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"], hidden_size=hidden_size, **heads)
    short = Lfm2Config(num_hidden_layers=1, layer_types=["conv"], hidden_size=hidden_size)
    return {
        "gated delta net": SimpleNamespace(
            config=delta, layers=[SimpleNamespace(linear_attn=Qwen3_5GatedDeltaNet(delta, 0))]
        ),
        "short convolution": SimpleNamespace(config=short, layers=[SimpleNamespace(conv=Lfm2ShortConv(short, 0))]),
    }


def _step(
    layer: Any, num_sequences: int, num_tokens: int, hidden_size: int, device: torch.device
) -> functools.partial[torch.Tensor]:
    """Returns what computes so many tokens of each sequence, behind the first one."""
    sizes = PoolSizes(num_sequences, 0)
    layer.pool.allocate(sizes, device)
    uses = tuple(StateUse(slot, None, ()) for slot in range(num_sequences))
    lengths = (num_tokens,) * num_sequences
    kv_lens = (1 + num_tokens,) * num_sequences
    metadata = AttentionMetadata(
        full=BlockMetadata(torch.empty(0), (), ()),
        sliding=None,
        query_lens=lengths,
        kv_lens=kv_lens,
        mutual_spans=((),) * num_sequences,
        is_mutual_beyond_window=False,
        states=uses,
        state_step=StateStep.of(state_arrays(uses, kv_lens, lengths, sizes), lambda numbers: numbers.to(device)),
    )
    hidden = torch.randn(1, sum(lengths), hidden_size).to(device, layer.pool.shape.dtype)

    def compute() -> torch.Tensor:
        with forward_context(SdpaBackend(), metadata):
            output: torch.Tensor = layer(hidden)
        return output

    return functools.partial(compute)


def _seconds(step: functools.partial[torch.Tensor], device: torch.device, num_calls: int) -> float:
    def several() -> None:
        for _ in range(num_calls):
            step()

    return statistics.median(seconds_of(several, device)) / num_calls
