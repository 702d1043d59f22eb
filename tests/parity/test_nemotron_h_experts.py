"""Nemotron-H's experts, which have no gates and may compute latents, by our kernel: answers are those of `generate`."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.native_experts import NativeExperts
from decoder_svc.runner.cpu.runner import CPUModelRunner
from lookonce.model.half_model import text_child
from lookonce.model.kernels.native_linear import NativeLinear
from tests.decoder_svc.rounded_weights import round_weights
from tests.decoder_svc.runner.cpu.loaded_runner import load
from tests.parity import families, offline
from tests.tiny_families import FAMILIES, nemotron_h_omni

pytestmark = [pytest.mark.usefixtures("library"), pytest.mark.parametrize("name", ["nemotron_h_omni"])]

NUM_PROMPTS = 6
# The kernel pads units to whole vectors.
LATENTS = {"moe_latent_size": 32, "moe_intermediate_size": 40, "n_routed_experts": 6, "num_experts_per_tok": 3}


def text_modules(runner: ModelRunnerBase) -> list[Any]:
    model = runner.get_model()
    return list(getattr(model.model, text_child(model)).modules())


@pytest.mark.parametrize("text", [{}, LATENTS], ids=["hidden", "latents"])
def test_experts_and_all_linear_layers_are_computed_by_our_kernels(
    name: str, text: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    family = families.build(FAMILIES[name], nemotron_h_omni.build(tmp_path, text=text), NUM_PROMPTS)
    modules = text_modules(family.offline.runner)
    assert sum(isinstance(module, NativeExperts) for module in modules) == 1
    assert not any(hasattr(module, "num_experts") and hasattr(module, "down_proj") for module in modules)
    # Shared experts, MLPs, attention, and the projections of Mamba2 layers and of latents.
    assert not any(isinstance(module, torch.nn.Linear) for module in modules)
    assert sum(isinstance(module, NativeLinear) for module in modules) == (18 if text else 16)
    expected = [question.expected for question in family.offline.questions]
    for budget in (2048, 23):
        assert offline.run(family.offline, max_num_batched_tokens=budget)[0] == expected


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_of_latents_are_rounded(name: str, bits: int, tmp_path: pathlib.Path) -> None:
    whole, rounded = (nemotron_h_omni.build(tmp_path / one, text=LATENTS) for one in ("whole", "rounded"))
    round_weights(rounded, bits)
    expected = families.build(FAMILIES[name], rounded, NUM_PROMPTS).offline
    runner = load(whole, torch.float32)
    runner = CPUModelRunner(replace(runner.config, quantize_bits=bits), runner.family)
    assert any(isinstance(module, NativeExperts) for module in text_modules(runner))
    found = offline.run(replace(expected, runner=runner), max_num_batched_tokens=300)[0]
    assert found == [question.expected for question in expected.questions]
