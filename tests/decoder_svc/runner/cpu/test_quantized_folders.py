"""Folders whose weights are stored as codes: answers, memory and what is refused."""

from __future__ import annotations

import gc
import pathlib
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.cpu.native_experts import NativeExperts
from decoder_svc.runner.cpu.native_stack import NativeStack
from lookonce.errors import ConfigurationError, ModelFolderError
from lookonce.model.kernels.native_linear import NativeLinear
from lookonce.model.kernels.quantized_weight import QuantizedLinear
from tests.decoder_svc.runner.cpu.loaded_runner import load, text_model
from tests.parity import families, offline
from tests.quantized_folders import FORMS, store_quantized
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.usefixtures("library")


def built(family: str, form: str, tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns a folder with codes, and one with the weights that they stand for."""
    stored, whole = tmp_path / "stored", tmp_path / "whole"
    for folder in (stored, whole):
        folder.mkdir()
        FAMILIES[family].build(folder)
    assert store_quantized(stored, FORMS[form], whole)
    return stored, whole


# Each form once, and families with a stack, with single layers, with other names in their files and with states.
@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen2_5_vl", form) for form in FORMS]
    + [("llava_clip", "awq"), ("llava_clip", "compressed-int8"), ("gemma3", "gptq-4"), ("qwen3_5", "fp8-block")]
    + [("qwen3_vl_moe", "awq"), ("qwen3_5_moe", "fp8-block"), ("glm4v_moe", "compressed-int4-zeros")]
    + [("deepseek_ocr2", "compressed-int8"), ("qwen3_vl_moe", "gptq-act-order"), ("llama4", "awq")]
    + [("mistral4", "fp8-block"), ("nemotron_h_omni", "awq"), ("nemotron_h_omni", "compressed-int8")],
)
def test_answers_are_those_of_the_weights_that_codes_stand_for(family: str, form: str, tmp_path: pathlib.Path) -> None:
    stored, whole = built(family, form, tmp_path)
    expected = families.build(FAMILIES[family], whole, 6).offline
    runner = load(stored, torch.float32)
    assert isinstance(text_model(runner), NativeStack) == (family in ("qwen2_5_vl", "llava_clip"))
    has_experts = any(isinstance(module, NativeExperts) for module in runner.model.modules())
    assert has_experts == ("moe" in family or family in ("deepseek_ocr2", "llama4", "mistral4", "nemotron_h_omni"))
    found, _, _ = offline.run(replace(expected, runner=runner), max_num_batched_tokens=300)
    assert found == [question.expected for question in expected.questions]
    assert not any(isinstance(module, QuantizedLinear) for module in runner.model.modules())


@pytest.mark.parametrize("family", ["muse_spark", "step3p7"])
def test_layers_beside_experts_that_the_kernel_does_not_know_are_read_as_codes(
    family: str, tmp_path: pathlib.Path
) -> None:
    stored, whole = (FAMILIES[family].build(tmp_path / name) for name in ("stored", "whole"))
    assert store_quantized(stored, FORMS["awq"], whole, has_whole_experts=True)
    expected = families.build(FAMILIES[family], whole, 6).offline
    runner = load(stored, torch.float32)
    # One layer of Step 3.7 has no bound.
    assert sum(isinstance(module, NativeExperts) for module in runner.model.modules()) == (family == "step3p7")
    assert any(
        isinstance(module, NativeLinear) and module.weights.codes is not None for module in runner.model.modules()
    )
    found, _, _ = offline.run(replace(expected, runner=runner), max_num_batched_tokens=300)
    assert found == [question.expected for question in expected.questions]


@pytest.mark.parametrize("family", ["muse_spark"])
def test_codes_of_experts_that_the_kernel_does_not_know_are_refused(family: str, tmp_path: pathlib.Path) -> None:
    stored = FAMILIES[family].build(tmp_path)
    assert store_quantized(stored, FORMS["awq"])
    with pytest.raises(ModelFolderError, match=r"experts .* are not served: \w+ is none of the MLPs") as raised:
        load(stored, torch.float32)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("form", ["awq", "compressed-int8", "fp8-block"])
def test_kernels_read_codes_where_they_can(form: str, tmp_path: pathlib.Path) -> None:
    stored, whole = built("qwen2_5_vl", form, tmp_path)
    sizes = []
    for folder in (stored, whole):
        stack = text_model(load(folder, torch.bfloat16))
        assert isinstance(stack, NativeStack)
        sizes.append(stack.nbytes)
    assert sizes[0] < sizes[1]


def test_a_folder_with_codes_is_not_rounded_again(tmp_path: pathlib.Path) -> None:
    stored, _ = built("qwen2_5_vl", "gptq-4", tmp_path)
    runner = load(stored, torch.float32)
    with pytest.raises(ConfigurationError, match="a folder whose weights are quantized; leave it out"):
        type(runner)(replace(runner.config, quantize_bits=8), runner.family)


def test_without_our_kernels_weights_are_whole(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    stored, _ = built("llava_clip", "awq", tmp_path)
    runner = load(stored, torch.float16)
    assert "give --dtype bfloat16" in capfd.readouterr().err
    layers = [module for module in runner.model.modules() if "Linear" in type(module).__name__]
    assert layers
    assert not any(isinstance(layer, QuantizedLinear | NativeLinear) for layer in layers)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen3_vl_moe"])
def test_no_file_stays_mapped(family: str, tmp_path: pathlib.Path) -> None:
    if not (maps := pathlib.Path("/proc/self/maps")).exists():
        pytest.skip("only Linux lists mapped files there")
    stored, _ = built(family, "awq", tmp_path)
    runner = load(stored, torch.bfloat16)
    gc.collect()
    assert str(stored) not in maps.read_text()
    assert runner.model is not None
