"""The native stack: which models get it, what it must agree with, and that the batch changes no bit."""

from __future__ import annotations

import gc
import logging
import pathlib
from collections.abc import Callable, Sequence

import pytest
import torch

from decoder_svc.prompt.family import load_family
from decoder_svc.prompt.text_tokenizer import load_pretrained
from decoder_svc.runner.attention import PAGED_ATTENTION, register_paged_attention
from decoder_svc.runner.base import RunnerConfig
from decoder_svc.runner.cpu import native_model, stack_check
from decoder_svc.runner.cpu.native_stack import NativeStack
from decoder_svc.runner.cpu.packed_weights import NativeLinear
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.scheduling.request import RequestId, SamplingParams, TokenLogprobs
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SchedulerOutput
from lookonce.model.half_model import load_text_half, text_child
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.usefixtures("library")

BLOCK_SIZE = 8
HAVE_STACKS = {
    "idefics3", "internvl", "llava_clip", "llava_next", "llava_onevision", "llava_siglip", "mistral3", "pixtral",
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm",
}  # fmt: skip
HAVE_EXPERTS = {"qwen3_vl_moe"}
Built = Callable[[torch.dtype], CPUModelRunner]


def load(folder: pathlib.Path, dtype: torch.dtype) -> CPUModelRunner:
    family = load_family(ModelFolder.open(folder), load_pretrained(folder))
    return CPUModelRunner(RunnerConfig(folder, dtype, BLOCK_SIZE, num_threads=2), family)


def text_model(runner: CPUModelRunner) -> object:
    return getattr(runner.model.model, text_child(runner.model))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("llava"))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_like_llama_gets_a_stack_and_others_our_linear_layers(name: str, tmp_path: pathlib.Path) -> None:
    FAMILIES[name].build(tmp_path)
    runner = load(tmp_path, torch.float32)
    found = text_model(runner)
    assert isinstance(found, NativeStack) == (name in HAVE_STACKS)
    if not isinstance(found, NativeStack):
        assert isinstance(found, torch.nn.Module)
        assert any(isinstance(module, NativeLinear) for module in found.modules())
        assert not any(type(module) is torch.nn.Linear for module in found.modules())
    assert isinstance(runner.model.lm_head, NativeLinear)
    assert runner.is_batch_invariant == (name in HAVE_STACKS)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_file_is_unmapped_unless_it_holds_experts(
    name: str, dtype: torch.dtype, tmp_path: pathlib.Path
) -> None:
    if not (maps := pathlib.Path("/proc/self/maps")).exists():
        pytest.skip("this system does not tell what a process has mapped")
    FAMILIES[name].build(tmp_path)
    register_paged_attention()
    model = load_text_half(tmp_path, dtype, PAGED_ATTENTION)
    was_mapped = str(tmp_path) in maps.read_text()
    del model
    gc.collect()
    runner = load(tmp_path, dtype)
    gc.collect()
    is_mapped = str(tmp_path) in maps.read_text()
    assert is_mapped == (was_mapped and name in HAVE_EXPERTS)
    assert runner.model is not None
    assert was_mapped or dtype is torch.bfloat16, "else there is nothing to see here"


def test_a_stack_with_wrong_results_is_not_used(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Crooked(NativeStack):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self._last_norm[3] *= 1.001

    monkeypatch.setattr(native_model, "NativeStack", Crooked)
    with caplog.at_level(logging.WARNING):
        runner = load(folder, torch.float32)
    assert not isinstance(text_model(runner), NativeStack)
    assert "results differ from" in caplog.text


def test_a_stack_that_gives_nan_is_not_used(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(NativeStack):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self._last_norm.fill_(torch.nan)

    monkeypatch.setattr(native_model, "NativeStack", Broken)
    assert not isinstance(text_model(load(folder, torch.float32)), NativeStack)


def test_bfloat16_is_no_further_from_float32_than_transformers_modules_are(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three have the same weights, which are exact in bfloat16."""
    runs: list[torch.Tensor] = []
    run = stack_check.Trial.run

    def noted(*arguments: object) -> torch.Tensor:
        runs.append(run(*arguments))  # type: ignore[arg-type]
        return runs[-1]

    monkeypatch.setattr(stack_check.Trial, "run", noted)
    exact = load(folder, torch.float32)
    modules_exact = runs[0]
    del exact
    rounded = load(folder, torch.bfloat16)
    assert isinstance(text_model(rounded), NativeStack)
    _, _, modules, ours = runs
    error_of_modules = (modules - modules_exact).square().mean().sqrt()
    error_of_ours = (ours - modules_exact).square().mean().sqrt()
    assert error_of_ours <= error_of_modules


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def runner(folder: pathlib.Path, request: pytest.FixtureRequest) -> CPUModelRunner:
    runner = load(folder, request.param)
    assert isinstance(text_model(runner), NativeStack)
    assert runner.is_batch_invariant
    runner.initialize_kv_cache(64)
    return runner


PROMPT = tuple(5 + 7 * index % 300 for index in range(61))
OTHERS = ((9,) * 30, tuple(range(20, 37)))


def answer(runner: CPUModelRunner, stops: Sequence[int], others: Sequence[tuple[int, ...]]) -> TokenLogprobs:
    """Answers PROMPT in chunks that end at `stops`, with all of `others` in the last step."""
    params = SamplingParams(max_tokens=2, logprobs=20)
    name = RequestId("asked")
    released: list[RequestId] = [name]
    blocks = tuple(range(-(-len(PROMPT) // BLOCK_SIZE)))
    found = None
    for start, stop in zip((0, *stops), (*stops, len(PROMPT)), strict=False):
        is_last = stop == len(PROMPT)
        chunks = [ScheduledChunk(name, start, stop - start, 0, 0, blocks, samples=is_last)]
        admitted = [AdmittedRequest(name, PROMPT, len(PROMPT), (), None, (), params)] if start == 0 else []
        for index, other in enumerate(others if is_last else ()):
            own = RequestId(str(index))
            own_blocks = tuple(range(16 + 8 * index, 16 + 8 * index - (-len(other) // BLOCK_SIZE)))
            admitted.append(AdmittedRequest(own, other, len(other), (), None, (), params))
            chunks.append(ScheduledChunk(own, 0, len(other), 0, 0, own_blocks, samples=True))
            released.append(own)
        sampled = runner.execute_model(SchedulerOutput(tuple(admitted), tuple(chunks), (), (), ()))
        found = sampled[0].logprobs if is_last else None
    runner.execute_model(SchedulerOutput((), (), tuple(released), (), ()))
    assert found is not None
    return found


@pytest.mark.parametrize("stops", [(60,), (1, 2, 3), (8, 16, 50), (7, 20, 33, 46, 59)])
@pytest.mark.parametrize("others", [(), OTHERS], ids=["alone", "in a batch"])
def test_neither_chunks_nor_the_batch_change_a_bit(
    runner: CPUModelRunner, stops: tuple[int, ...], others: tuple[tuple[int, ...], ...]
) -> None:
    assert answer(runner, stops, others) == answer(runner, (), ())
