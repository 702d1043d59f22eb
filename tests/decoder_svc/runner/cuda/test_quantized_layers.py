"""Models with quantized weights on the simulated device, with kernels in Triton's interpreter."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoder_svc.runner.cuda import device_weight, quantized_layers
from decoder_svc.runner.cuda.quantized_layers import DeviceLinear
from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.worst_case import WorstCase
from lookonce.embedding_meta import RowDtype
from lookonce.errors import ConfigurationError
from lookonce.model.half_model import text_child
from lookonce.model.kernels.quantized_experts import QuantizedExperts
from tests.decoder_svc.rounded_weights import round_weights
from tests.decoder_svc.runner.cuda.fake_cuda import FakeCuda, installed
from tests.decoder_svc.runner.cuda.interpreted_triton import (
    triton_attention,
    triton_layers,
    triton_penalties,
    triton_quantized,
    triton_rowwise,
    triton_writes,
)
from tests.decoder_svc.runner.cuda.simulated_device import PINNED, RESULT, RETURN
from tests.parity import families, offline
from tests.quantized_folders import FORMS, store_quantized
from tests.tiny_families import FAMILIES

NUM_TOKENS = 3


@contextlib.contextmanager
def cuda() -> Iterator[FakeCuda]:
    num_threads = torch.get_num_threads()
    with installed(
        triton_attention, triton_layers, triton_penalties, triton_quantized, triton_rowwise, triton_writes
    ) as fake:
        yield fake
    torch.set_num_threads(num_threads)


def built(family: str, form: str, tmp_path: pathlib.Path) -> tuple[pathlib.Path, offline.OfflineModel, int]:
    """Returns a folder with codes, the model of the weights that they stand for, and the number of layers with codes.

    The reference is computed here, outside of the simulated device.
    """
    stored, whole = tmp_path / "stored", tmp_path / "whole"
    for folder in (stored, whole):
        folder.mkdir()
        FAMILIES[family].build(folder)
    layers = store_quantized(stored, FORMS[form], whole)
    return stored, families.build(FAMILIES[family], whole, 3).offline, len(layers)


def runner_of(model: offline.OfflineModel, folder: pathlib.Path, **changes: Any) -> GPUModelRunner:
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "use_graphs": False} | changes
    return GPUModelRunner(replace(model.runner.config, folder=folder, **settings), model.runner.family)


def question(model: offline.OfflineModel) -> offline.Question:
    """Returns the shortest question with an image."""
    asked = [each for each in model.questions if each.prompt.images]
    return min(asked, key=lambda each: len(each.prompt.token_ids))


def layers_of(runner: GPUModelRunner) -> list[DeviceLinear]:
    return [module for module in runner.get_model().modules() if isinstance(module, DeviceLinear)]


def text_model(runner: GPUModelRunner) -> Any:
    model = runner.get_model()
    return getattr(model.model, text_child(model))


def check_answer(model: offline.OfflineModel, runner: GPUModelRunner) -> None:
    asked = question(model)
    session = offline.Session(replace(model, runner=runner), num_blocks=200, max_num_batched_tokens=2048)
    runner.capture_model()
    answers = session.ask([asked.prompt], max_tokens=NUM_TOKENS)
    assert answers.token_ids == [asked.expected[:NUM_TOKENS]]


# Merged projections with and without biases; single layers; each kind of codes.
@pytest.mark.parametrize(
    ("family", "form", "is_fused"),
    [
        ("llava_clip", "awq", True),
        ("qwen2_5_vl", "fp8-block", True),
        ("qwen3_vl", "compressed-int8", True),
        ("gemma3", "compressed-int4-zeros", False),
    ],
)
def test_answers_are_those_of_the_weights_that_codes_stand_for(
    family: str, form: str, is_fused: bool, tmp_path: pathlib.Path
) -> None:
    stored, model, num_layers = built(family, form, tmp_path)
    with cuda() as fake:
        runner = runner_of(model, stored)
        assert type(text_model(runner)).__name__ == "FusedStack" or not is_fused
        # Queries, keys and values are one layer of a stack, gates and values that they gate another one.
        assert len(layers_of(runner)) >= num_layers * (4 if is_fused else 7) // 7
        with fake.device.noting() as events:
            check_answer(model, runner)
    assert {event.kind for event in events} == {PINNED, RESULT, RETURN}, "no step waits for the device early"


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_give_the_answers_of_the_rounded_model(bits: int, tmp_path: pathlib.Path) -> None:
    whole, rounded = tmp_path / "whole", tmp_path / "rounded"
    for folder in (whole, rounded):
        folder.mkdir()
        FAMILIES["qwen2_5_vl"].build(folder)
    round_weights(rounded, bits)
    model = families.build(FAMILIES["qwen2_5_vl"], rounded, 3).offline
    with cuda():
        runner = runner_of(model, whole, quantize_bits=bits, use_graphs=True)
        assert isinstance(runner.get_model().lm_head, DeviceLinear)
        check_answer(model, runner)
        assert runner.graphs is not None


def test_nothing_is_compiled_while_serving(tmp_path: pathlib.Path) -> None:
    stored, model, _ = built("llava_clip", "awq", tmp_path)
    with cuda() as fake:
        runner = runner_of(model, stored)
        runner.profile_run(WorstCase(4, 2, 4, 0, 0, 1, RowDtype.FLOAT32))
        compiled = set(fake.device.variants)
        check_answer(model, runner)
        assert fake.device.variants - compiled == set()


def wrong(linear: Any) -> Any:
    return lambda rows, weight, bias, processors: linear(rows, weight, bias, processors) * 1.01


def undefined(linear: Any) -> Any:
    return lambda rows, weight, bias, processors: linear(rows, weight, bias, processors) * torch.nan


def failing(_linear: Any) -> Any:
    def linear(*_: Any) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    return linear


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (wrong, "results for 1 rows differ by 0.01"),
        (undefined, "results for 1 rows differ by nan"),
        (failing, r"its kernels fail \(RuntimeError\)"),
    ],
)
def test_kernels_that_fail_leave_whole_weights(
    broken: Any,
    reason: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stored, model, _ = built("llava_clip", "awq", tmp_path)
    monkeypatch.setattr(triton_quantized, "linear", broken(triton_quantized.linear))
    with cuda():
        runner = runner_of(model, stored)
        assert re.search(reason, capfd.readouterr().err)
        assert not layers_of(runner)
        check_answer(model, runner)
        with pytest.raises(ConfigurationError, match=f"quantize is not offered on this device: {reason}; leave it out"):
            runner_of(model, model.runner.config.folder, quantize_bits=8)


def test_the_second_layer_that_fails_leaves_no_layer_with_codes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, model, _ = built("llava_clip", "awq", tmp_path)
    right, sizes = triton_quantized.linear, set()

    def linear(rows: Any, weight: Any, bias: Any, processors: int) -> Any:
        sizes.add((weight.num_outputs, weight.num_inputs))
        return right(rows, weight, bias, processors) * (1 if len(sizes) < 2 else 2)

    monkeypatch.setattr(triton_quantized, "linear", linear)
    with cuda():
        runner = runner_of(model, stored)
        assert len(sizes) == 2
        assert not layers_of(runner)
        check_answer(model, runner)


def test_merged_layers_are_compared_with_many_rows_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored, model, num_layers = built("llava_clip", "awq", tmp_path)
    right = triton_quantized.expanded

    def expanded(weight: Any) -> Any:
        return right(weight) * (1 if weight.num_outputs in sizes else 2)

    config = json.loads((stored / "config.json").read_text())["text_config"]
    sizes = {config["hidden_size"], config["intermediate_size"], config["vocab_size"]}
    sizes.add(config["hidden_size"] * config["num_key_value_heads"] // config["num_attention_heads"])
    monkeypatch.setattr(triton_quantized, "expanded", expanded)
    with cuda(), caplog.at_level(logging.INFO):
        runner = runner_of(model, stored)
        assert "a layer that was merged is wrong: results for 129 rows differ by 1" in caplog.text
        assert len(layers_of(runner)) == num_layers
        check_answer(model, runner)


def test_a_layer_that_kernels_cannot_read_gets_a_whole_weight(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, model, num_layers = built("llava_clip", "awq", tmp_path)
    seen = []

    def tile_inputs(weight: Any) -> int | None:
        seen.append(weight)
        # The first one is the head.
        return None if len(seen) == 2 else device_weight.tile_inputs(weight)

    monkeypatch.setattr(quantized_layers, "tile_inputs", tile_inputs)
    with cuda():
        runner = runner_of(model, stored)
        assert len(layers_of(runner)) == num_layers - 1
        # The projections of one layer cannot be merged now.
        assert type(text_model(runner)).__name__ == "LlamaModel"
        check_answer(model, runner)


def test_experts_have_whole_weights(tmp_path: pathlib.Path) -> None:
    stored, model, _ = built("qwen3_vl_moe", "awq", tmp_path)
    with cuda():
        runner = runner_of(model, stored)
        assert layers_of(runner)
        assert any("Experts" in type(module).__name__ for module in runner.get_model().modules())
        assert not any(isinstance(module, QuantizedExperts) for module in runner.get_model().modules())
        with pytest.raises(ConfigurationError, match="quantize is offered for models with experts on CPUs only"):
            runner_of(model, model.runner.config.folder, quantize_bits=8)


def test_without_triton_weights_are_whole(tmp_path: pathlib.Path) -> None:
    stored, model, _ = built("llava_clip", "awq", tmp_path)
    num_threads = torch.get_num_threads()
    with installed():
        runner = runner_of(model, stored)
        assert not layers_of(runner)
        check_answer(model, runner)
    torch.set_num_threads(num_threads)
