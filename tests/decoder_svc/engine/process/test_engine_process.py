"""An engine in a process of its own answers as one in a thread does, and its faults are those of the service."""

from __future__ import annotations

import asyncio
import pathlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry

from decoder_svc.engine import engine as engine_module
from decoder_svc.engine.core import EngineCore
from decoder_svc.engine.process import engine_process
from decoder_svc.engine.process.engine_process import EngineProcess
from decoder_svc.service import open_service
from decoder_svc.settings import DecoderSettings
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import ConfigurationError, ModelFolderError
from lookonce.server.admission.quotas import Quotas
from lookonce.server.settings_parser import parse_settings
from tests import image_files, tiny_models
from tests.decoder_svc.decoders import RunningDecoder, params, reference, running_decoder, source
from tests.decoder_svc.encoders import running_encoder

PICTURES = [image_files.encoded(image_files.noise(index, 60, 50)) for index in range(3)]
MISSING = b"\x07" * 32


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return model_folder("llava_clip")


@pytest.fixture
async def encoder(folder: pathlib.Path) -> AsyncIterator[str]:
    async with running_encoder(folder) as target:
        yield target


def questions() -> list[pb.GenerateParams]:
    """Texts and pictures, greedy and sampled, long and short, and one that cannot be answered."""
    asked = [params(f"zebra {index}", max_tokens=5 + index, ignore_eos=True) for index in range(6)]
    asked += [params("what", source(picture), max_tokens=9, ignore_eos=True) for picture in PICTURES]
    asked += [params("both", source(PICTURES[0]), source(PICTURES[2]), max_tokens=7, temperature=0.9, seed=2**63)]
    asked += [params("likely", max_tokens=4, logprobs=3, logit_bias={7: -50.0})]
    return [*asked, params("gone", reference(MISSING), max_tokens=3)]


async def answer(decoder: RunningDecoder, asked: pb.GenerateParams) -> object:
    try:
        response = await decoder.stub.Generate(pb.GenerateRequest(params=asked), timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    (choice,) = response.choices
    usage = response.usage
    counts = (usage.prompt_tokens, usage.image_tokens, usage.completion_tokens)
    return list(choice.token_ids), choice.text, choice.finish_reason, list(choice.logprobs), counts


async def answers(decoder: RunningDecoder) -> Sequence[object]:
    return await asyncio.gather(*(answer(decoder, asked) for asked in questions()))


def core_of(decoder: RunningDecoder) -> EngineCore:
    return decoder.service.engine._core


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_process_answers_as_a_thread_until_it_is_killed(
    folder: pathlib.Path, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_LEAST_SILENCE_S", 1.5)
    async with running_decoder(folder, encoder, dtype="float32") as decoder:
        expected = await answers(decoder)
        known = core_of(decoder).facts
    async with running_decoder(folder, encoder, dtype="float32", engine="process", max_step_s=2.0) as decoder:
        assert await answers(decoder) == expected
        core = core_of(decoder)
        assert isinstance(core, EngineProcess)
        # The encoder of this test is in the thread's process.
        assert replace(core.facts, kernel_choices=(), process_id=None) == replace(known, kernel_choices=())
        assert core.facts.process_id == core.pid
        memory = decoder.registry.get_sample_value("lookonce_decoder_engine_process_resident_memory_bytes")
        assert memory is not None
        assert memory > 50 << 20
        assert core.facts.kernel_choices
        assert all(choice in known.kernel_choices for choice in core.facts.kernel_choices)
        await until(lambda: decoder.service.engine.load().live_requests == 0)
        assert core._files == {}, "no picture is kept for a request that has ended"
        assert decoder.service.engine.counters().prefix_query_tokens > 100
        await _cancelled_calls_leave_nothing(decoder)
        await _a_process_that_is_stopped_is_unhealthy(decoder, core)
        await _a_killed_process_ends_every_call(decoder, core)
    assert not psutil.pid_exists(core.pid)


async def _cancelled_calls_leave_nothing(decoder: RunningDecoder) -> None:
    calls = [
        decoder.stub.GenerateStream(
            pb.GenerateStreamRequest(params=params("long", source(picture), max_tokens=900, ignore_eos=True))
        )
        for picture in PICTURES
    ]
    for call in calls:
        await call.read()
    for call in calls:
        call.cancel()
    await until(lambda: decoder.service.engine.load().live_requests == 0)
    assert decoder.service.engine.load().kv_cache_usage == 0
    core = core_of(decoder)
    assert isinstance(core, EngineProcess)
    assert core._files == {}


async def _a_process_that_is_stopped_is_unhealthy(decoder: RunningDecoder, core: EngineProcess) -> None:
    """Also one that has no work, so that nobody is sent to it."""
    question = params("zebra", max_tokens=3, ignore_eos=True)
    engine = psutil.Process(core.pid)
    engine.suspend()
    waiting = asyncio.create_task(answer(decoder, question))
    await until(lambda: not decoder.service.engine.is_healthy)
    assert not decoder.service.engine.has_died
    assert await answer(decoder, question) == (
        grpc.StatusCode.UNAVAILABLE,
        "the engine does not answer; retry on another replica",
    )
    engine.resume()
    found = await waiting
    assert isinstance(found, tuple)
    assert len(found[0]) == 3
    await until(lambda: decoder.service.engine.is_healthy)


async def _to_its_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def _a_killed_process_ends_every_call(decoder: RunningDecoder, core: EngineProcess) -> None:
    long = params("long", max_tokens=900, ignore_eos=True)
    streams = [decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=long)) for _ in range(3)]
    for stream in streams:
        await stream.read()
    psutil.Process(core.pid).send_signal(signal.SIGKILL)
    for stream in streams:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await _to_its_end(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "retry on another replica" in (ended.value.details() or "")
    assert decoder.service.engine.has_died
    assert not decoder.service.engine.is_healthy
    found = await answer(decoder, params("late", max_tokens=3))
    assert isinstance(found, tuple)
    assert found[0] is grpc.StatusCode.UNAVAILABLE
    assert decoder.service.engine.load().live_requests == 0


async def test_a_step_that_hangs_does_not_outlive_the_stop(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_STOP_TIMEOUT_S", 0.2)
    async with running_decoder(folder, engine="process") as decoder:
        core = core_of(decoder)
        assert isinstance(core, EngineProcess)
        psutil.Process(core.pid).suspend()
    assert not psutil.pid_exists(core.pid)
    assert not core._sender.is_alive()


async def test_a_process_that_cannot_start_gives_the_reason(folder: pathlib.Path) -> None:
    flags = ["--engine", "process", "--block-size", "1024", "--kv-cache-memory-bytes", "65536"]
    settings = parse_settings(DecoderSettings, ["--model", str(folder), *flags], "decoder_svc")
    registry = CollectorRegistry()
    with pytest.raises(ConfigurationError, match="the KV pool may take 65536 bytes"):
        async with open_service(settings, registry, Quotas(None, registry)):
            pass
    assert not [child for child in psutil.Process().children() if engine_process._MODULE in child.cmdline()]


def test_a_process_that_ends_while_it_starts_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_MODULE", "antigravity_that_is_not_there")
    process = EngineProcess({}, 1.0)
    with pytest.raises(RuntimeError, match="status 1 before its model was loaded"):
        process.wait_until_loaded()
    process.close()


async def test_a_service_that_cannot_start_leaves_no_process(tmp_path: pathlib.Path) -> None:
    """The engine's process is loading the model by then."""
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 0}')
    settings = parse_settings(DecoderSettings, ["--model", str(folder), "--engine", "process"], "decoder_svc")
    registry = CollectorRegistry()
    with pytest.raises(ModelFolderError, match="repetition_penalty"):
        async with open_service(settings, registry, Quotas(None, registry)):
            pass
    assert not [child for child in psutil.Process().children() if engine_process._MODULE in child.cmdline()]
