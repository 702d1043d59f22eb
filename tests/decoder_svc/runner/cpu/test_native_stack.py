"""The native stack agrees with transformers' modules, and neither chunks nor the batch change a bit."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from decoder_svc.runner.cpu import stack_check
from decoder_svc.runner.cpu.native_stack import NativeStack
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import TokenLogprobs
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SchedulerOutput
from lookonce.model.kernels.native_level import processor_levels
from tests import tiny_models
from tests.decoder_svc.runner.cpu.loaded_runner import BLOCK_SIZE, load, text_model

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("llava"))


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


@pytest.fixture(scope="module", params=[level.name for level in processor_levels()])
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forces each level that this processor has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKONCE_NATIVE_LEVEL", request.param)
        yield


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def runner(folder: pathlib.Path, level: None, request: pytest.FixtureRequest) -> CPUModelRunner:
    runner = load(folder, request.param)
    # The results were compared with those of transformers' modules.
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
