"""Steps that overlap give every request the answer that it gets without overlap, whatever happens meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.sampling import sampling_batch
from decoder_svc.runner.sampling.device_penalties import DevicePenalties
from decoder_svc.runner.sampling.sampler import Sampler
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.sampling_params import SamplingParams
from lookonce.errors import InternalError, OverloadedError
from tests import tiny_models
from tests.decoder_svc.engine.driven_engine import Asked, DrivenEngine, Served, Workload, random_workload
from tests.decoder_svc.runner.cuda.fake_cuda import FakeCuda, installed
from tests.decoder_svc.runner.cuda.simulated_device import PINNED, RESULT, RETURN
from tests.parity import offline

# Blocks of the pool: too few for all requests together, and enough for each.
SMALL_POOL, LARGE_POOL = 15, 100
NUM_CPU_SEEDS, NUM_CUDA_SEEDS = 60, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")
    return offline.build(folder, num_prompts=5, images_per_prompt=(0, 1, 2))


@pytest.fixture(scope="module")
def expected(model: offline.OfflineModel) -> Callable[[int], dict[RequestId, Served]]:
    """The answers to a random workload without mishaps and overlap, by seed. Many tests compare with the same ones."""

    @functools.cache
    def answers(seed: int) -> dict[RequestId, Served]:
        return DrivenEngine(model, overlaps=False, num_blocks=LARGE_POOL).serve(random_workload(model, seed).quiet)

    return answers


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with installed() as cuda:
        yield cuda


@pytest.fixture
def cuda_model(model: offline.OfflineModel, cuda: FakeCuda) -> offline.OfflineModel:
    runner = model.runner
    # The largest graph holds what the engine computes in a step. A larger one takes gigabytes on the simulated device.
    config = replace(runner.config, max_num_seqs=6, max_num_batched_tokens=40)
    return replace(model, runner=GPUModelRunner(config, runner.family))


@pytest.fixture(autouse=True)
def few_sorted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many draws fall on tokens that are not sorted, and have to be repeated."""
    monkeypatch.setattr(sampling_batch, "SORTED_TOKENS", 24)


def check(served: dict[RequestId, Served], expected: dict[RequestId, Served], workload: Workload) -> None:
    """Raises AssertionError unless each answer is the expected one, or its beginning if it was cut off."""
    aborted = set(workload.aborts.values())
    for request_id, one in served.items():
        right = expected[request_id]
        assert one.token_ids == right.token_ids[: len(one.token_ids)], f"{request_id} was answered wrongly"
        assert [each.top[0][0] for each in one.logprobs] == [
            each.top[0][0] for each in right.logprobs[: len(one.logprobs)]
        ]
        if isinstance(one.end, InternalError):
            assert workload.failures
        elif one.end is FinishReason.ABORT:
            assert request_id in aborted
        else:
            assert (one.end, one.token_ids) == (right.end, right.token_ids)
            usage, right_usage = one.usage, right.usage
            assert usage is not None
            assert right_usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (
                right_usage.prompt_tokens,
                right_usage.completion_tokens,
            )
            counted = usage.encoded_image_tokens + usage.cached_image_tokens + usage.skipped_image_tokens
            assert counted == usage.image_tokens == right_usage.image_tokens


@pytest.mark.parametrize("num_blocks", [SMALL_POOL, LARGE_POOL])
@pytest.mark.parametrize("seed", range(NUM_CPU_SEEDS))
def test_answers_are_those_without_overlap(
    model: offline.OfflineModel, expected: Callable[[int], dict[RequestId, Served]], seed: int, num_blocks: int
) -> None:
    workload = random_workload(model, seed)
    served = DrivenEngine(model, overlaps=True, num_blocks=num_blocks).serve(workload)
    check(served, expected(seed), workload)


@pytest.mark.parametrize("seed", range(NUM_CUDA_SEEDS))
def test_answers_on_a_simulated_device_are_those_of_the_cpu(
    model: offline.OfflineModel,
    cuda_model: offline.OfflineModel,
    expected: Callable[[int], dict[RequestId, Served]],
    seed: int,
) -> None:
    workload = random_workload(model, seed)
    served = DrivenEngine(cuda_model, overlaps=True, num_blocks=SMALL_POOL).serve(workload)
    check(served, expected(seed), workload)


def penalised(workload: Workload) -> Workload:
    """The same workload with penalties on earlier tokens, different ones for each request."""
    asked = []
    for index, one in enumerate(workload.asked):
        penalties: dict[str, Any] = {"repetition_penalty": 1.05 + index % 3 / 4, "frequency_penalty": index % 2 / 2}
        # A third of the requests have a flat distribution, whose draws are often repeated.
        flat: dict[str, Any] = {"temperature": 2.0} if index % 3 == 0 else {}
        asked.append(replace(one, params=replace(one.params, **penalties, **flat)))
    return replace(workload, asked=asked)


@pytest.mark.parametrize("seed", range(NUM_CUDA_SEEDS))
def test_penalised_answers_on_a_simulated_device_are_those_of_the_cpu(
    model: offline.OfflineModel, cuda_model: offline.OfflineModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native sampler rounds flat distributions otherwise, so the CPU samples with PyTorch here."""
    monkeypatch.setattr(model.runner, "sampler", Sampler(lambda host: host))
    workload = penalised(random_workload(model, seed))
    expected = DrivenEngine(model, overlaps=False, num_blocks=LARGE_POOL).serve(workload.quiet)
    engine = DrivenEngine(cuda_model, overlaps=True, num_blocks=SMALL_POOL)
    served = engine.serve(workload)
    check(served, expected, workload)
    assert engine.num_ahead > engine.num_launches / 2
    sampler = cuda_model.runner.sampler
    assert isinstance(sampler, Sampler)
    assert isinstance(sampler.penalties, DevicePenalties)
    assert sampler.penalties.num_free_slots == cuda_model.runner.config.max_num_seqs


def test_workloads_are_worth_testing_with(model: offline.OfflineModel) -> None:
    ahead = preemptions = stopped = failed = aborted = 0
    for seed in range(20):
        engine = DrivenEngine(model, overlaps=True, num_blocks=SMALL_POOL)
        served = engine.serve(random_workload(model, seed))
        ends = [one.end for one in served.values()]
        ahead += engine.num_ahead
        preemptions += engine.scheduler.num_preemptions
        stopped += ends.count(FinishReason.STOP)
        aborted += ends.count(FinishReason.ABORT)
        failed += sum(isinstance(end, InternalError) for end in ends)
    assert min(ahead, preemptions, stopped, failed, aborted) >= 8, (ahead, preemptions, stopped, failed, aborted)


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.05}, {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.2}]
)
def test_in_a_steady_batch_with_penalties_each_step_runs_ahead(
    cuda_model: offline.OfflineModel, cuda: FakeCuda, params: dict[str, Any]
) -> None:
    asked = [
        Asked(
            RequestId(f"r{index}"), cuda_model.questions[0].prompt, SamplingParams(max_tokens=12, seed=1, **params), 0
        )
        for index in range(4)
    ]
    engine = DrivenEngine(cuda_model, overlaps=True, num_blocks=LARGE_POOL)
    first = len(cuda.device.events)
    engine.serve(Workload(asked))
    assert engine.num_ahead == engine.num_launches - 1
    kinds = [event.kind for event in cuda.device.events[first:]]
    assert {*kinds} == {PINNED, RETURN, RESULT}
    # A step's numbers and, if it draws, its random numbers.
    copies = [PINNED] * (2 if "temperature" in params else 1)
    steady = [*copies, RETURN, RESULT] * 8
    assert any(kinds[index : index + len(steady)] == steady for index in range(len(kinds)))


def test_in_a_steady_batch_nothing_waits_between_two_launches(cuda_model: offline.OfflineModel, cuda: FakeCuda) -> None:
    """Each step is launched before the one before it is read, and that reading is all that the host waits for."""
    params = SamplingParams(max_tokens=12)
    asked = [Asked(RequestId(f"r{index}"), cuda_model.questions[0].prompt, params, 0) for index in range(4)]
    engine = DrivenEngine(cuda_model, overlaps=True, num_blocks=LARGE_POOL)
    first = len(cuda.device.events)
    served = engine.serve(Workload(asked))
    assert {tuple(one.token_ids[:8]) for one in served.values()} == {tuple(cuda_model.questions[0].expected)}
    kinds = [event.kind for event in cuda.device.events[first:]]
    assert {*kinds} == {PINNED, RETURN, RESULT}
    assert engine.num_launches == 12
    assert engine.num_ahead == 11
    # Each launch copies its numbers to the device and its tokens back; only then the step before it is waited for.
    steady = [PINNED, RETURN, RESULT] * 8
    assert any(kinds[index : index + len(steady)] == steady for index in range(len(kinds)))


def test_a_step_whose_tokens_the_host_must_see_first_is_not_overlapped(model: offline.OfflineModel) -> None:
    params = SamplingParams(max_tokens=6, repetition_penalty=1.2)
    engine = DrivenEngine(model, overlaps=True, num_blocks=LARGE_POOL)
    engine.serve(Workload([Asked(RequestId("r0"), model.questions[0].prompt, params, 0)]))
    assert engine.num_launches == 6
    assert engine.num_ahead == 0


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_token_that_is_drawn_again_is_computed_again(
    model: offline.OfflineModel, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it has read another id. Devices draw again, and the native sampler of CPUs never does."""
    monkeypatch.setattr(model.runner, "sampler", Sampler(lambda host: host))
    params = SamplingParams(max_tokens=12, temperature=2.0, seed=1, logprobs=logprobs)
    workload = Workload([Asked(RequestId("r0"), model.questions[0].prompt, params, 0)])
    expected = DrivenEngine(model, overlaps=False, num_blocks=LARGE_POOL).serve(workload)
    engine = DrivenEngine(model, overlaps=True, num_blocks=LARGE_POOL)
    served = engine.serve(workload)
    assert served[RequestId("r0")].token_ids == expected[RequestId("r0")].token_ids
    assert served[RequestId("r0")].logprobs == expected[RequestId("r0")].logprobs
    assert engine.num_launches > 14
    assert engine.num_ahead == engine.num_launches - 1


def test_no_step_is_launched_for_a_request_that_certainly_ends(model: offline.OfflineModel) -> None:
    engine = DrivenEngine(model, overlaps=True, num_blocks=LARGE_POOL)
    engine.serve(Workload([Asked(RequestId("r0"), model.questions[0].prompt, SamplingParams(max_tokens=5), 0)]))
    assert engine.num_launches == 5


def test_after_a_launch_that_failed_half_way_requests_read_their_own_blocks(cuda_model: offline.OfflineModel) -> None:
    """The device's block tables lacked what the failed launch should have written. The retry read another's blocks."""
    runner = cuda_model.runner
    first, second = cuda_model.questions[:2]
    prompts = {"r0": first, "r1": second, "r2": first, "r3": first}
    params = SamplingParams(max_tokens=8)
    asked = [
        Asked(RequestId(name), question.prompt, params, 30 * number)
        for number, (name, question) in enumerate(prompts.items())
    ]
    engine = DrivenEngine(cuda_model, overlaps=True, num_blocks=LARGE_POOL)
    write = runner.feed.write
    failures: list[int] = []

    def fails_once(unknown: tuple[tuple[int, int], ...], token_ids: torch.Tensor) -> None:
        if engine.round >= 60 and not failures:
            failures.append(engine.round)
            raise torch.OutOfMemoryError
        write(unknown, token_ids)

    vars(runner.feed)["write"] = fails_once
    served = engine.serve(Workload(asked))
    assert failures
    assert isinstance(served[RequestId("r2")].end, OverloadedError)
    for name in ("r0", "r1", "r3"):
        assert served[RequestId(name)].token_ids == prompts[name].expected[:8]
