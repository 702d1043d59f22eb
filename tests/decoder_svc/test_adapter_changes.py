"""Adapters that operators load and unload while a decoder answers."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
import torch
from safetensors.torch import load_file, save_file

import lookonce
from decoder_svc.settings import DecoderSettings
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderAdminServiceStub
from lookonce.errors import InvalidParameterError, UnsupportedError
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder
from tests.decoder_svc.encoders import served
from tests.lookonce.command import run_here
from tests.lora_folders import lora_folder

if TYPE_CHECKING:
    from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderAdminServiceAsyncStub

INVALID = grpc.StatusCode.INVALID_ARGUMENT
# The server of the operators' calls has these settings.
_VALUES: dict[str, Any] = {"model": DEMO_MODEL, "encoder_target": None, "drain_timeout_s": 0.5}
SETTINGS = DecoderSettings(**_VALUES)


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> pathlib.Path:
    for seed, name in enumerate(("one", "two")):
        lora_folder(tmp_path / name, DEMO_MODEL, seed=seed)
    return tmp_path


# Engines by where they run; the last one is split over two processes.
ENGINES: dict[str, dict[str, Any]] = {
    "thread": {}, "process": {"engine": "process"}, "ranks": {"tensor_parallel_size": 2}
}  # fmt: skip


@pytest.fixture(params=ENGINES)
async def decoder(request: pytest.FixtureRequest, folders: pathlib.Path) -> AsyncIterator[RunningDecoder]:
    settings: dict[str, Any] = {"adapters": f"first={folders / 'one'}", "adapters_folder": folders}
    settings["admin_listen"] = "127.0.0.1:0"
    async with running_decoder(DEMO_MODEL, dtype="float32", **ENGINES[request.param], **settings) as decoder:
        yield decoder


@pytest.fixture
async def admin(decoder: RunningDecoder) -> AsyncIterator[DecoderAdminServiceAsyncStub]:
    async with (
        served(SETTINGS, decoder.service.admin_entry()) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        yield DecoderAdminServiceStub(channel)


async def answer(decoder: RunningDecoder, adapter: str) -> list[int]:
    request = params("a red star", max_tokens=8, min_tokens=8, temperature=0.0)
    request.adapter = adapter
    return list((await decoder.stub.Generate(pb.GenerateRequest(params=request))).choices[0].token_ids)


def requests_by_adapter(decoder: RunningDecoder) -> dict[str, float]:
    """Returns what the decoder's metrics say."""
    return {
        sample.labels["adapter"]: sample.value
        for family in decoder.registry.collect()
        for sample in family.samples
        if sample.name == "lookonce_decoder_adapter_requests_total"
    }


async def refused(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


async def test_adapters_come_and_go(
    decoder: RunningDecoder, admin: DecoderAdminServiceAsyncStub, folders: pathlib.Path
) -> None:
    base, first = await answer(decoder, ""), await answer(decoder, "first")
    assert base != first
    loaded = await admin.LoadAdapter(pb.LoadAdapterRequest(name="two"))
    assert list(loaded.adapters) == ["first", "two"]
    second = await answer(decoder, "two")
    assert second not in (base, first)
    # The same content under another name: one stays when the other goes.
    await admin.LoadAdapter(pb.LoadAdapterRequest(name="one"))
    assert list((await admin.UnloadAdapter(pb.UnloadAdapterRequest(name="first"))).adapters) == ["one", "two"]
    assert await answer(decoder, "one") == first
    assert list((await admin.UnloadAdapter(pb.UnloadAdapterRequest(name="one"))).adapters) == ["two"]
    gone = params("a red star")
    gone.adapter = "one"
    code, text = await refused(decoder.stub.Generate(pb.GenerateRequest(params=gone)))
    assert (code, text) == (INVALID, "adapter: 'one' is not served; this server has two")
    assert await answer(decoder, "two") == second
    # Other content under the name that was there: the prefix cache must not know it.
    lora_folder(folders / "one", DEMO_MODEL, seed=7)
    await admin.LoadAdapter(pb.LoadAdapterRequest(name="one"))
    assert await answer(decoder, "one") not in (base, first, second)
    assert await answer(decoder, "two") == second
    assert await answer(decoder, "") == base


async def test_operators_have_clients_and_a_command(decoder: RunningDecoder, folders: pathlib.Path) -> None:
    async with (
        served(SETTINGS, decoder.service.admin_entry()) as target,
        lookonce.AsyncAdminClient.connect(target) as admin,
    ):
        assert await admin.load_adapter("two") == ["first", "two"]
        assert await answer(decoder, "two") != await answer(decoder, "first")
        assert await admin.unload_adapter("two") == ["first"]
        with pytest.raises(InvalidParameterError, match="'two' is not served"):
            await admin.unload_adapter("two")

        def in_sync() -> None:
            with lookonce.AdminClient.connect(target) as admin:
                assert admin.load_adapter("two") == ["first", "two"]
                assert admin.unload_adapter("first") == ["two"]
                with pytest.raises(UnsupportedError):
                    admin.stats()
            for arguments, printed in (
                (["load", "one"], "adapters: one, two\n"),
                (["unload", "one"], "adapters: two\n"),
                (["unload", "two"], "adapters: none\n"),
            ):
                done = run_here({}, "adapters", *arguments, "--target", target)
                assert (done.returncode, done.stdout) == (0, printed), done.stderr
                served = run_here({}, "adapters", "list", "--target", decoder.target)
                assert (served.returncode, served.stdout) == (0, printed), served.stderr
            done = run_here({}, "adapters", "load", "nowhere", "--target", target)
            assert done.returncode == 1
            assert "adapter nowhere: adapter_config.json is missing" in done.stderr

        await asyncio.to_thread(in_sync)


async def test_what_cannot_be_loaded_is_named(
    decoder: RunningDecoder, admin: DecoderAdminServiceAsyncStub, folders: pathlib.Path
) -> None:
    (folders / "empty").mkdir()
    lora_folder(folders / "other", DEMO_MODEL, seed=9, r=8)
    (folders / "other" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    for place, (name, value) in enumerate((("nan", torch.nan), ("infinite", -torch.inf))):
        lora_folder(folders / name, DEMO_MODEL, seed=9)
        tensors = load_file(folders / name / "adapter_model.safetensors")
        tensors[list(tensors)[place]].view(-1)[5] = value
        save_file(tensors, folders / name / "adapter_model.safetensors")
    for name, expected in (
        ("nan", "hold NaN or infinity"),
        ("infinite", "name: adapter infinite: the matrices of "),
        ("nowhere", "name: adapter nowhere: adapter_config.json is missing"),
        ("../one", "name: the adapter name '../one' must be 1 to 64 characters"),
        ("..", "name: the adapter name '..' must be"),
        ("a" * 4096, "must be 1 to 64 characters"),
        ("one\0", "must be 1 to 64 characters"),
        ("", "must be 1 to 64 characters"),
        (DEMO_MODEL.name, f"name: {DEMO_MODEL.name} is the name of the base model"),
        ("empty", "name: adapter empty: adapter_config.json is missing"),
        ("other", "they must be"),
    ):
        code, text = await refused(admin.LoadAdapter(pb.LoadAdapterRequest(name=name)))
        assert code is INVALID
        assert expected in text
    lora_folder(folders / "first", DEMO_MODEL, seed=3)
    code, text = await refused(admin.LoadAdapter(pb.LoadAdapterRequest(name="first")))
    assert (code, text) == (INVALID, "name: first is served with another content; unload it first")
    code, text = await refused(admin.UnloadAdapter(pb.UnloadAdapterRequest(name="nowhere")))
    assert (code, text) == (INVALID, "name: 'nowhere' is not served")
    assert (await answer(decoder, "first")) != (await answer(decoder, ""))


async def test_an_adapter_goes_when_its_last_request_has_ended(
    decoder: RunningDecoder, admin: DecoderAdminServiceAsyncStub
) -> None:
    request = params("a red star", max_tokens=1500, min_tokens=1500)
    request.adapter = "first"
    stream = decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=request))
    await anext(aiter(stream))
    code, _ = await refused(admin.UnloadAdapter(pb.UnloadAdapterRequest(name="first"), timeout=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    # The call has ended first, so the adapter is served again.
    while "first" not in (await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())).adapters:
        await asyncio.sleep(0.01)
    unloading = asyncio.ensure_future(admin.UnloadAdapter(pb.UnloadAdapterRequest(name="first")))
    while "first" in (await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())).adapters:
        await asyncio.sleep(0.01)
    assert not unloading.done()
    stream.cancel()
    assert list((await unloading).adapters) == []
    assert await answer(decoder, "")


async def test_a_change_whose_call_ends_first_is_complete_or_undone(
    decoder: RunningDecoder, admin: DecoderAdminServiceAsyncStub
) -> None:
    first, second = await answer(decoder, "first"), None
    for pause_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1):
        for call in (
            admin.LoadAdapter(pb.LoadAdapterRequest(name="two")),
            admin.UnloadAdapter(pb.UnloadAdapterRequest(name="first")),
        ):
            await asyncio.sleep(pause_s)
            call.cancel()
        await admin.LoadAdapter(pb.LoadAdapterRequest(name="two"))
        second = second or await answer(decoder, "two")
        assert await answer(decoder, "two") == second != first
        names = (await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())).adapters
        if "first" in names:
            assert await answer(decoder, "first") == first
        else:
            await admin.LoadAdapter(pb.LoadAdapterRequest(name="one"))
            assert await answer(decoder, "one") == first
            await admin.UnloadAdapter(pb.UnloadAdapterRequest(name="one"))
            return
        await admin.UnloadAdapter(pb.UnloadAdapterRequest(name="two"))


async def test_a_call_that_is_not_read_keeps_no_adapter_and_no_other_change_waits(
    decoder: RunningDecoder, admin: DecoderAdminServiceAsyncStub
) -> None:
    adapters = decoder.service.adapters
    is_live = True
    with adapters.used("first", lambda: is_live):
        unloading = asyncio.ensure_future(adapters.unload("first"))
        await asyncio.sleep(0.1)
        assert list((await admin.LoadAdapter(pb.LoadAdapterRequest(name="two"))).adapters) == ["two"]
        loaded = await admin.LoadAdapter(pb.LoadAdapterRequest(name="one"))
        # The same content is served under another name, so nothing has to end.
        await unloading
        assert list(loaded.adapters) == ["one", "two"]
        unloading = asyncio.ensure_future(adapters.unload("one"))
        await asyncio.sleep(0.1)
        assert not unloading.done()
        code, text = await refused(admin.LoadAdapter(pb.LoadAdapterRequest(name="one")))
        assert (code, text) == (INVALID, "name: one is being unloaded; call again when that has ended")
        # The engine is done with the request, and its caller does not read the answer.
        is_live = False
        await unloading
        assert adapters.names == ["two"]
    assert await answer(decoder, "two")


async def test_requests_that_end_while_their_adapter_goes_spoil_no_batch(
    decoder: RunningDecoder, admin: DecoderAdminServiceAsyncStub
) -> None:
    base, first = await answer(decoder, ""), await answer(decoder, "first")
    await admin.LoadAdapter(pb.LoadAdapterRequest(name="two"))
    for _ in range(20):
        request = params("a blue moon", max_tokens=1500, min_tokens=1500)
        request.adapter = "two"
        stream = decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=request))
        await anext(aiter(stream))
        others = [asyncio.ensure_future(answer(decoder, name)) for name in ("", "first")]
        unloading = asyncio.ensure_future(admin.UnloadAdapter(pb.UnloadAdapterRequest(name="two")))
        await asyncio.sleep(0)
        stream.cancel()
        await unloading
        assert await asyncio.gather(*others) == [base, first]
        await admin.LoadAdapter(pb.LoadAdapterRequest(name="two"))


async def test_without_a_folder_nothing_is_loaded() -> None:
    async with running_decoder(DEMO_MODEL) as decoder:
        assert list((await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())).adapters) == []
        async with (
            served(SETTINGS, decoder.service.admin_entry()) as target,
            grpc.aio.insecure_channel(target) as channel,
        ):
            call = DecoderAdminServiceStub(channel).LoadAdapter(pb.LoadAdapterRequest(name="one"))
            assert (await refused(call))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_metrics_have_the_adapters_that_are_loaded(
    decoder: RunningDecoder, admin: DecoderAdminServiceAsyncStub
) -> None:
    assert requests_by_adapter(decoder) == {"first": 0}
    await admin.LoadAdapter(pb.LoadAdapterRequest(name="two"))
    for name in ("", "first", "two", "two"):
        await answer(decoder, name)
    await refused(answer(decoder, "unknown"))
    assert requests_by_adapter(decoder) == {"first": 1, "two": 2}
    tokens = decoder.registry.get_sample_value("lookonce_decoder_adapter_generated_tokens_total", {"adapter": "two"})
    assert tokens == 16
    await admin.UnloadAdapter(pb.UnloadAdapterRequest(name="first"))
    assert requests_by_adapter(decoder) == {"two": 2}
    assert decoder.registry.get_sample_value("lookonce_decoder_adapters") == 1
