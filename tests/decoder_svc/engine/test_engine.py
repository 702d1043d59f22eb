"""The engine with a real tiny model gives every request one terminal answer, whatever happens."""

from __future__ import annotations

import asyncio
import math
import pathlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from decoder_svc.engine import engine as engine_module
from decoder_svc.engine.engine import Engine
from decoder_svc.engine.engine_thread import EngineThread
from decoder_svc.engine.figures import EngineLimits
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.prompt.family import DecoderFamily, load_family
from decoder_svc.rows.embedding_fetcher import EmbeddingFetcher
from decoder_svc.rows.fetch_metrics import FetchMetrics
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import SchedulerLimits
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from lookonce.errors import (
    ContextTooLongError,
    InternalError,
    InvalidParameterError,
    LookonceError,
    UnavailableError,
)
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.decoder_svc.constraint.demo_constraints import demo_constraints
from tests.decoder_svc.scheduling.simulation import image

POISON = 13
BLOCK_SIZE = 8
NUM_BLOCKS = 40


class PoisonableRunner(CPUModelRunner):
    """Fails on prompts that begin with the id POISON, as a model with a bug would. It waits for `may_fail` to fail."""

    def __init__(self, config: RunnerConfig, family: DecoderFamily) -> None:
        super().__init__(config, family)
        self.may_fail = threading.Event()
        self.may_fail.set()

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        self._update_states(output)
        for chunk in output.chunks:
            if self.batch[chunk.request_id].token_ids[0] == POISON:
                assert self.may_fail.wait(60)
                raise ValueError("secret inner detail")
        known = tuple(replace(chunk, block_ids=()) for chunk in output.chunks)
        return super().execute_model(SchedulerOutput((), known, (), (), ()))


def no_fetcher() -> EmbeddingFetcher:
    """Returns a fetcher with neither a shared cache nor an encoder."""
    return EmbeddingFetcher(None, None, num_workers=1, timeout_s=5, ttl_s=60, metrics=FetchMetrics(CollectorRegistry()))


def engine_of(
    runner: CPUModelRunner, scheduler: Scheduler, limits: EngineLimits, max_step_s: float = math.inf
) -> Engine:
    """Returns an engine in a thread of this process, without an encoder."""
    return Engine(EngineThread(runner, scheduler, limits, Heartbeat(max_step_s), demo_constraints()), no_fetcher())


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> PoisonableRunner:
    folder: pathlib.Path = tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")
    family = load_family(ModelFolder.open(folder), tiny_models.load_processor(folder).tokenizer)
    return PoisonableRunner(RunnerConfig(folder, torch.float32, BLOCK_SIZE, num_threads=1), family)


@pytest.fixture
async def engine(runner: PoisonableRunner) -> AsyncIterator[Engine]:
    runner.initialize_kv_cache(NUM_BLOCKS)
    limits = EngineLimits(100, BLOCK_SIZE, NUM_BLOCKS, 32, 8, 64, 64, 16)
    scheduler = Scheduler(
        SchedulerLimits(32, 8, 100, 64), KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), EncoderCacheManager(64)
    )
    engine = engine_of(runner, scheduler, limits)
    engine.start()
    yield engine
    await engine.stop()
    scheduler.check_integrity()


def submit(engine: Engine, name: str, prompt: tuple[int, ...] = (20, 21, 22), max_tokens: int = 5) -> OutputStream:
    return engine.submit(RequestId(name), Prompt(prompt), SamplingParams(max_tokens=max_tokens))


async def read(stream: OutputStream) -> tuple[list[int], RequestOutput]:
    outputs = [output async for output in stream]
    assert sum(output.finish_reason is not None for output in outputs) == 1
    return [token for output in outputs for token in output.token_ids], outputs[-1]


async def test_first_output_is_the_admission_and_the_last_has_the_reason(engine: Engine) -> None:
    outputs = [output async for output in submit(engine, "a")]
    first, last = outputs[0], outputs[-1]
    assert first.usage is not None
    assert last.usage is not None
    assert first.token_ids == ()
    assert first.usage.prompt_tokens == 3
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage.completion_tokens == 5
    assert last.usage.time_to_first_token_s > 0


async def test_the_admission_comes_while_the_first_step_computes(
    runner: PoisonableRunner, small_engine: Callable[..., Engine]
) -> None:
    engine = small_engine()
    engine.start()
    runner.may_fail.clear()
    stream = submit(engine, "slow", (POISON, 1))
    async with asyncio.timeout(30):
        admission = await anext(aiter(stream))
        assert admission.usage is not None
        assert admission.usage.prompt_tokens == 2
        runner.may_fail.set()
        with pytest.raises(InternalError):
            await read(stream)
    await engine.stop()


async def test_a_request_that_never_ran_gets_its_end_at_once(engine: Engine) -> None:
    """There is no other request whose step would flush the answer."""
    prompt = Prompt((20, 21, 22, 23), (image("x", 0, 3),))
    stream = engine.submit(RequestId("no encoder"), prompt, SamplingParams(max_tokens=5))
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError):
            await read(stream)


async def test_alone_and_in_a_crowd_the_answer_is_the_same(engine: Engine) -> None:
    prompts = [tuple(range(20 + i, 26 + 2 * i)) for i in range(12)]
    alone = [(await read(submit(engine, f"alone{i}", prompt)))[0] for i, prompt in enumerate(prompts)]
    crowd = await asyncio.gather(*(read(submit(engine, f"crowd{i}", prompt)) for i, prompt in enumerate(prompts)))
    assert [tokens for tokens, _ in crowd] == alone


async def test_abort_ends_a_request_with_its_reason_and_frees_its_blocks(engine: Engine) -> None:
    stream = submit(engine, "a", max_tokens=90)
    await anext(aiter(stream))
    engine.abort(RequestId("a"), FinishReason.STOP)
    engine.abort(RequestId("a"))
    engine.abort(RequestId("unknown"))
    _, last = await read(stream)
    assert last.finish_reason is FinishReason.STOP
    await read(submit(engine, "b"))
    assert engine.load().kv_cache_usage == 0


async def test_a_failing_step_takes_only_its_own_requests_and_hides_the_details(engine: Engine) -> None:
    with pytest.raises(InternalError) as caught:
        await read(submit(engine, "bad", (POISON, 1)))
    assert "secret" not in caught.value.message
    tokens, _ = await read(submit(engine, "good"))
    assert len(tokens) == 5
    assert engine.is_healthy
    assert engine.load().kv_cache_usage == 0


async def test_repeated_failures_end_the_engine_and_every_request_gets_an_answer(runner: PoisonableRunner) -> None:
    scheduler = Scheduler(
        SchedulerLimits(2, 8, 100, 64), KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), EncoderCacheManager(64)
    )
    limits = EngineLimits(100, BLOCK_SIZE, NUM_BLOCKS, 2, 8, 64, 64, 16)
    engine = engine_of(runner, scheduler, limits)
    engine.start()
    streams = [submit(engine, f"bad{i}", (POISON, 1)) for i in range(6)]
    results = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
    # Each of the first three was alone in a step that failed. The others were never computed.
    assert [type(result) for result in results] == [InternalError] * 3 + [UnavailableError] * 3
    await asyncio.to_thread(engine._core.join)
    assert not engine.is_healthy
    assert engine.has_died
    with pytest.raises(UnavailableError):
        submit(engine, "late")
    await engine.stop()


@pytest.fixture
def small_engine(runner: PoisonableRunner) -> Callable[..., Engine]:
    """Returns a function that makes engines with two tokens, and so one request, in a step."""

    def make(**options: float) -> Engine:
        scheduler = Scheduler(
            SchedulerLimits(2, 8, 100, 64), KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), EncoderCacheManager(64)
        )
        limits = EngineLimits(100, BLOCK_SIZE, NUM_BLOCKS, 2, 8, 64, 64, 16)
        return engine_of(runner, scheduler, limits, **options)

    return make


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_request_still_in_the_inbox_when_the_engine_dies_gets_an_answer(
    runner: PoisonableRunner, small_engine: Callable[..., Engine]
) -> None:
    engine = small_engine()
    engine.start()
    for index in range(2):
        with pytest.raises(InternalError):
            await read(submit(engine, f"bad{index}", (POISON, 1)))
    runner.may_fail.clear()
    last = submit(engine, "bad2", (POISON, 1))
    await until(lambda: engine.load().running_requests == 1)
    late = submit(engine, "late")
    runner.may_fail.set()
    async with asyncio.timeout(30):
        with pytest.raises(InternalError):
            await read(last)
        with pytest.raises(UnavailableError):
            await read(late)
    assert engine.has_died
    await engine.stop()


async def test_an_engine_whose_step_hangs_is_unhealthy_until_it_ends(
    runner: PoisonableRunner, small_engine: Callable[..., Engine]
) -> None:
    engine = small_engine(max_step_s=0.1)
    engine.start()
    runner.may_fail.clear()
    hanging = submit(engine, "bad", (POISON, 1))
    await until(lambda: not engine.is_healthy)
    assert not engine.has_died
    with pytest.raises(UnavailableError):
        submit(engine, "meanwhile")
    runner.may_fail.set()
    with pytest.raises(InternalError):
        await read(hanging)
    await until(lambda: engine.is_healthy)
    assert len((await read(submit(engine, "afterwards")))[0]) == 5
    await asyncio.sleep(0.3)
    assert engine.is_healthy, "an engine without work does not hang"
    await engine.stop()
    assert not engine.has_died


async def test_stop_does_not_wait_for_a_step_that_hangs(
    runner: PoisonableRunner, small_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_STOP_TIMEOUT_S", 0.1)
    engine = small_engine()
    engine.start()
    runner.may_fail.clear()
    hanging = submit(engine, "bad", (POISON, 1))
    await until(lambda: engine.load().running_requests == 1)
    async with asyncio.timeout(30):
        await engine.stop()
        with pytest.raises(UnavailableError):
            await read(hanging)
    runner.may_fail.set()
    await asyncio.to_thread(engine._core.join)


async def test_stop_waits_no_longer_for_a_step_that_has_taken_long_before(
    runner: PoisonableRunner, small_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_STOP_TIMEOUT_S", 3600.0)
    engine = small_engine()
    engine.start()
    runner.may_fail.clear()
    submit(engine, "bad", (POISON, 1))
    await until(lambda: engine.load().running_requests == 1)
    core = engine._core
    assert isinstance(core, EngineThread)
    monkeypatch.setattr(core._step_loop._heartbeat, "_clock", lambda: time.monotonic() + 3600)
    async with asyncio.timeout(30):
        await engine.stop()
    runner.may_fail.set()
    await asyncio.to_thread(engine._core.join)


async def test_failures_with_nothing_between_them_but_empty_steps_are_failures_in_a_row(
    runner: PoisonableRunner,
) -> None:
    """Requests come one after the other: each failure is followed by a step that only removes a request."""
    scheduler = Scheduler(
        SchedulerLimits(2, 8, 100, 64), KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), EncoderCacheManager(64)
    )
    engine = engine_of(runner, scheduler, EngineLimits(100, BLOCK_SIZE, NUM_BLOCKS, 2, 8, 64, 64, 16))
    engine.start()
    for index in range(3):
        assert engine.is_healthy
        with pytest.raises(InternalError):
            await read(submit(engine, f"bad{index}", (POISON, 1)))
        # Time for the empty step after the failure.
        await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        await asyncio.to_thread(engine._core.join, 10)
    assert not engine.is_healthy
    await engine.stop()


async def test_requests_that_can_never_fit_are_refused_with_value_and_limit(engine: Engine) -> None:
    with pytest.raises(ContextTooLongError, match=r"101 tokens, the limit is 100"):
        submit(engine, "long", tuple(range(20, 81)), max_tokens=40)
    big = Prompt((1,) * 70, (image("x", 0, 65),))
    with pytest.raises(ContextTooLongError, match="65 embedding rows"):
        engine.submit(RequestId("big"), big, SamplingParams(max_tokens=1))


async def test_load_counts_a_request_from_its_submission_to_its_answer(engine: Engine) -> None:
    streams = [submit(engine, f"r{i}") for i in range(24)]
    assert engine.load().live_requests == 24
    answers = await asyncio.gather(*(read(stream) for stream in streams))
    assert all(len(tokens) == 5 for tokens, _ in answers)
    await until(lambda: engine.load().live_requests == 0)


async def test_an_id_is_free_again_after_the_answer(engine: Engine) -> None:
    stream = submit(engine, "same")
    with pytest.raises(InvalidParameterError, match="request_id"):
        submit(engine, "same")
    await read(stream)
    await read(submit(engine, "same"))


async def test_a_picture_without_an_encoder_fails_alone(engine: Engine) -> None:
    prompt = Prompt((5, 1, 1, 1, 1, 6), (image("x", 1, 4),))
    stream = engine.submit(RequestId("picture"), prompt, SamplingParams(max_tokens=3))
    text = submit(engine, "text")
    with pytest.raises(UnavailableError, match="no encoder"):
        await read(stream)
    assert len((await read(text))[0]) == 5


async def test_stop_gives_every_live_request_an_answer(runner: PoisonableRunner) -> None:
    scheduler = Scheduler(
        SchedulerLimits(32, 2, 100, 64), KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), EncoderCacheManager(64)
    )
    limits = EngineLimits(100, BLOCK_SIZE, NUM_BLOCKS, 32, 2, 64, 64, 16)
    engine = engine_of(runner, scheduler, limits)
    engine.start()
    streams = [submit(engine, f"r{i}", max_tokens=90) for i in range(6)]
    await engine.stop()
    results = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
    assert all(isinstance(result, LookonceError | tuple) for result in results)
    assert any(isinstance(result, UnavailableError) for result in results)


async def test_a_reader_that_is_behind_finds_the_steps_coalesced_without_loss(engine: Engine) -> None:
    expected, _ = await read(submit(engine, "fast", max_tokens=40))
    slow = submit(engine, "slow", max_tokens=40)
    while not slow.is_closed:
        await asyncio.sleep(0.01)
    outputs = [output async for output in slow]
    assert len(outputs) <= 2
    assert [token for output in outputs for token in output.token_ids] == expected
