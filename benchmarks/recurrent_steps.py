"""One recurrent layer of each kind with random weights, and steps of it. Shared by benchmarks of CPUs and of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import Lfm2Config, NemotronHConfig, Qwen3_5TextConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from decoder_svc.runner.attention import SdpaBackend, forward_context
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels, RecurrentLayer, lone_step, recurrent_layer
from decoder_svc.runner.state_step import PoolSizes
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.text_support import recurrent_kinds

# Computes a step from hidden states `[1, num_tokens, hidden_size]`.
Layer = Callable[[Tensor], Tensor]


def one_layer_models(hidden_size: int) -> dict[str, Any]:
    """Returns models of one layer each by its name, with the sizes of heads and filters of Qwen3.5, LFM2 and Nemotron.

    A delta net of Qwen3.5 has a head of 128 numbers for each 64 hidden elements, and twice as many for values. A Mamba2
    layer has a head of 64 numbers for each 32 hidden elements, with a state of 128 rows, and a group for each 8 heads.
    """
    torch.manual_seed(0)
    heads = {"linear_num_key_heads": hidden_size // 64, "linear_num_value_heads": hidden_size // 32}
    delta = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"], hidden_size=hidden_size, **heads)
    num_heads = hidden_size // 32
    mamba = NemotronHConfig(
        layers_block_type=["linear_attention"],
        hidden_size=hidden_size,
        mamba_num_heads=num_heads,
        n_groups=max(1, num_heads // 8),
    )
    short = Lfm2Config(num_hidden_layers=1, layer_types=["conv"], hidden_size=hidden_size)
    return {
        "gated delta net": SimpleNamespace(
            config=delta, layers=[SimpleNamespace(linear_attn=Qwen3_5GatedDeltaNet(delta, 0))]
        ),
        "short convolution": SimpleNamespace(config=short, layers=[SimpleNamespace(conv=Lfm2ShortConv(short, 0))]),
        "Mamba2": SimpleNamespace(config=mamba, layers=[SimpleNamespace(mixer=NemotronHMamba2Mixer(mamba, 0))]),
    }


def move(text_model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Moves the modules of such a model's layer."""
    for module in vars(text_model.layers[0]).values():
        module.to(device, dtype)


def has_kernel(text_model: Any, dtype: torch.dtype, kernels: RecurrentKernels) -> bool:
    """Whether kernels compute such a model's layer."""
    return _computed(text_model, dtype, kernels).has_kernel


def _computed(text_model: Any, dtype: torch.dtype, kernels: RecurrentKernels) -> RecurrentLayer:
    return recurrent_layer(text_model.layers[0], recurrent_kinds(text_model.config)[0], dtype, kernels)


def step_of(
    text_model: Any,
    dtype: torch.dtype,
    kernels: RecurrentKernels,
    num_sequences: int,
    num_tokens: int,
    device: torch.device,
) -> Layer:
    """Returns what computes so many tokens of each sequence, behind the first one, with a model's layer."""
    computed = _computed(text_model, dtype, kernels)
    sizes = PoolSizes(num_sequences, 0)
    computed.pool.allocate(sizes, device)
    uses = tuple(StateUse(slot, None, ()) for slot in range(num_sequences))
    # The first token of each sequence is there already.
    starts, lengths = (1,) * num_sequences, (num_tokens,) * num_sequences
    metadata = lone_step(uses, starts, lengths, sizes, lambda numbers: numbers.to(device))
    backend = SdpaBackend()

    def compute(hidden: Tensor) -> Tensor:
        with forward_context(backend, metadata):
            return computed(hidden)

    return compute
