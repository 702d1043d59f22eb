"""Models whose weights are rounded while they are loaded."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoder_svc.runner.cpu import runner as cpu_runner
from decoder_svc.runner.cpu.native_experts import NativeExperts
from decoder_svc.runner.cpu.native_stack import NativeStack
from decoder_svc.runner.cpu.runner import CPUModelRunner
from lookonce.errors import ConfigurationError
from lookonce.model.kernels.kernel_choice import PYTORCH, KernelChoice
from lookonce.model.kernels.quantized_weight import QuantizedLinear
from tests.decoder_svc.rounded_weights import round_weights
from tests.decoder_svc.runner.cpu.loaded_runner import load, text_model
from tests.parity import families, offline
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.usefixtures("library")


def quantizing(runner: Any, bits: int) -> CPUModelRunner:
    return CPUModelRunner(replace(runner.config, quantize_bits=bits), runner.family)


_STACKS = ("llava_clip", "qwen2_5_vl", "qwen3_vl")
# Our linear layers in transformers' modules.
_OTHERS = ("gemma3", "gemma4", "qwen3_5")
_WITH_EXPERTS = (
    "aria",
    "ernie4_5_vl_moe",
    "gemma4_moe",
    "glm4v_moe",
    "llama4",
    "mistral4",
    "nemotron_h_omni",
    "qwen3_5_moe",
    "qwen3_vl_moe",
)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", [*_STACKS, *_OTHERS, *_WITH_EXPERTS])
def test_answers_are_those_of_a_model_with_the_rounded_weights(name: str, bits: int, tmp_path: pathlib.Path) -> None:
    whole_folder, rounded_folder = tmp_path / "whole", tmp_path / "rounded"
    for folder in (whole_folder, rounded_folder):
        folder.mkdir()
        FAMILIES[name].build(folder)
    round_weights(rounded_folder, bits)
    rounded = families.build(FAMILIES[name], rounded_folder, 6).offline
    whole = load(whole_folder, torch.float32)
    runner = quantizing(whole, bits)
    assert isinstance(text_model(runner), NativeStack) == (name in _STACKS)
    assert any(isinstance(module, NativeExperts) for module in runner.model.modules()) == (name in _WITH_EXPERTS)
    found, _, _ = offline.run(replace(rounded, runner=runner), max_num_batched_tokens=300)
    assert found == [question.expected for question in rounded.questions]
    unrounded, _, _ = offline.run(replace(rounded, runner=whole), max_num_batched_tokens=300)
    assert bits == 8 or unrounded != found, "else the weights were not rounded"


# Another activation, experts whose outputs are normed, and bounded gates beside a layer without a bound.
@pytest.mark.parametrize(
    ("name", "changes", "num_mixtures"),
    [("qwen3_vl_moe", {"hidden_act": "tanh"}, 0), ("muse_spark", {}, 0), ("step3p7", {}, 1)],
)
def test_other_experts_are_refused_by_name(
    name: str, changes: dict[str, Any], num_mixtures: int, tmp_path: pathlib.Path
) -> None:
    FAMILIES[name].build(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = load(tmp_path, torch.float32)
    assert sum(isinstance(module, NativeExperts) for module in whole.model.modules()) == num_mixtures
    for bits in (4, 8):
        with pytest.raises(ConfigurationError, match=r"quantize is not offered for models with such experts \(layers"):
            quantizing(whole, bits)


def test_our_kernel_computes_quantized_layers_though_pytorch_is_faster_with_whole_ones(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES["llava_clip"].build(tmp_path)
    whole = load(tmp_path, torch.bfloat16)
    choice = KernelChoice("linear layers", PYTORCH, {PYTORCH: 1.0})
    monkeypatch.setattr(cpu_runner, "choose_step_linear", lambda dtype: choice)
    found = text_model(quantizing(whole, 8))
    assert isinstance(found, NativeStack)
    assert isinstance(text_model(whole), NativeStack)
    assert not any(isinstance(module, QuantizedLinear) for module in found.modules())


def test_threads_that_are_late_change_nothing(tmp_path: pathlib.Path) -> None:
    """There are more threads than processors, so some are still in an earlier phase of the stack than others."""
    FAMILIES["llava_clip"].build(tmp_path)
    family = families.build(FAMILIES["llava_clip"], tmp_path, 2)
    whole = load(tmp_path, torch.bfloat16)
    answers = []
    for num_threads in (1, 5, 5, 5):
        runner = CPUModelRunner(replace(whole.config, quantize_bits=8, num_threads=num_threads), whole.family)
        assert isinstance(text_model(runner), NativeStack)
        session = offline.Session(replace(family.offline, runner=runner))
        found = [session.ask([question.prompt], max_tokens=60) for question in family.offline.questions]
        answers.append([one.token_ids for one in found])
    assert answers == answers[:1] * len(answers)
