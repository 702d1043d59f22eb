"""The clients repeat calls that no server took: how often, after which pauses, and within which budget."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lookonce
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import (
    AbortedError,
    DeadlineError,
    EmbeddingNotCachedError,
    InternalError,
    InvalidParameterError,
    LookonceError,
    OverloadedError,
    UnavailableError,
)
from lookonce.images import ImageRef
from lookonce.local.reserved_port import reserved_port
from lookonce.sdk import retries
from lookonce.sdk.connection.channel import Deadline
from lookonce.sdk.retries import Attempts, Retries, RetryBudget
from tests.lookonce.sdk.sdk_servers import System, running_system

REFUSED = "draining"


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as started:
        yield started


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that no server advises are short, for tests of what follows them."""
    monkeypatch.setattr(retries, "_FIRST_PAUSE_S", 0.01)


async def generated(target: str, **options: Any) -> str:
    async with lookonce.AsyncClient.connect(target, **options) as client:
        return (await client.generate("one two")).text


async def streamed(target: str, **options: Any) -> str:
    async with lookonce.AsyncClient.connect(target, **options) as client:
        return "".join([piece async for piece in client.stream("one two")])


async def generated_sync(target: str, **options: Any) -> str:
    def call() -> str:
        with lookonce.Client.connect(target, **options) as client:
            return client.generate("one two").text

    return await asyncio.to_thread(call)


async def streamed_sync(target: str, **options: Any) -> str:
    def call() -> str:
        with lookonce.Client.connect(target, **options) as client:
            return "".join(client.stream("one two"))

    return await asyncio.to_thread(call)


every_call = pytest.mark.parametrize("call", [generated, streamed, generated_sync, streamed_sync])


def num_calls(system: System) -> int:
    return system.knowledge.count("Generate") + system.knowledge.count("GenerateStream")


@pytest.mark.usefixtures("short_pauses")
@every_call
@pytest.mark.parametrize("error", [UnavailableError(REFUSED), OverloadedError("full", retry_after_s=0.01)])
async def test_a_call_that_was_refused_twice_is_answered(system: System, call: Any, error: LookonceError) -> None:
    system.decoder.failures = [error, error]
    assert await call(system.decoder_target) == "one two +0"
    assert num_calls(system) == 3
    assert len({request_id for _, request_id, _ in system.knowledge.calls}) == 1, "one request, one id"


@pytest.mark.usefixtures("short_pauses")
@every_call
@pytest.mark.parametrize("max_retries", [0, 1, 2, 4])
async def test_the_last_refusal_is_raised(system: System, call: Any, max_retries: int) -> None:
    system.decoder.failures = [UnavailableError(f"{REFUSED} {index}") for index in range(max_retries + 1)]
    with pytest.raises(UnavailableError, match=f"{REFUSED} {max_retries}"):
        await call(system.decoder_target, max_retries=max_retries)
    assert num_calls(system) == max_retries + 1


@every_call
@pytest.mark.parametrize("error", [InternalError("broken"), InvalidParameterError("request_id", "is being served")])
async def test_other_errors_are_final(system: System, call: Any, error: LookonceError) -> None:
    system.decoder.failures = [error]
    with pytest.raises(type(error)):
        await call(system.decoder_target)
    assert num_calls(system) == 1


@pytest.mark.usefixtures("short_pauses")
@every_call
async def test_the_id_of_an_attempt_that_lost_its_connection_may_still_be_in_use(system: System, call: Any) -> None:
    system.decoder.failures = [UnavailableError("reset"), InvalidParameterError("request_id", "is being served")]
    assert await call(system.decoder_target) == "one two +0"


@pytest.mark.usefixtures("short_pauses")
@every_call
async def test_a_pause_that_the_server_advises_is_kept(system: System, call: Any) -> None:
    system.decoder.failures = [OverloadedError("full", retry_after_s=0.25)]
    began_s = time.monotonic()
    assert await call(system.decoder_target) == "one two +0"
    assert time.monotonic() - began_s >= 0.25


@every_call
@pytest.mark.parametrize(("timeout_s", "advised_s"), [(20.0, 30.0), (None, 61.0)])
async def test_nobody_waits_for_a_pause_that_ends_too_late(
    system: System, call: Any, timeout_s: float | None, advised_s: float
) -> None:
    system.decoder.failures = [OverloadedError("full", retry_after_s=advised_s)]
    with pytest.raises(OverloadedError):
        await call(system.decoder_target, timeout_s=timeout_s)
    assert num_calls(system) == 1


@pytest.mark.parametrize("call", [streamed, streamed_sync])
async def test_a_stream_is_not_repeated_once_its_text_was_seen(system: System, call: Any) -> None:
    system.decoder.error_after_first_word = UnavailableError(REFUSED)
    with pytest.raises(UnavailableError, match=REFUSED):
        await call(system.decoder_target)
    assert num_calls(system) == 1


@pytest.mark.usefixtures("short_pauses")
async def test_the_bytes_of_an_image_follow_also_after_a_refusal(system: System) -> None:
    image = ImageRef.from_bytes(b"x" * 100_000)
    async with lookonce.AsyncClient.connect(system.decoder_target) as client:
        system.decoder.failures = [UnavailableError(REFUSED)]
        assert (await client.generate("a", images=[image])).text == "a +1"
        system.knowledge.cached.clear()
        system.decoder.failures = [UnavailableError(REFUSED), EmbeddingNotCachedError("evicted", indexes=[0])]
        assert "".join([piece async for piece in client.stream("a", images=[image])]) == "a +1"
    assert len(system.knowledge.uploads) == 2


@pytest.mark.usefixtures("short_pauses")
async def test_calls_of_the_encoder_are_repeated(system: System) -> None:
    system.encoder.failures = [UnavailableError(REFUSED)] * 2
    async with lookonce.AsyncClient.connect(system.decoder_target, system.encoder_target) as client:
        assert await client.lookup([b"picture"]) == [False]
    system.encoder.failures = [UnavailableError(REFUSED)] * 2
    with lookonce.Client.connect(system.decoder_target, system.encoder_target) as sync:
        assert len(await asyncio.to_thread(sync.encode, [b"picture"])) == 1
    assert not system.encoder.failures


@pytest.mark.parametrize("call", [generated, generated_sync])
async def test_an_address_where_no_server_ever_answered_fails_at_once(call: Any) -> None:
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(10):
            await call("127.0.0.1:1", timeout_s=600)


async def test_a_client_waits_for_its_server_to_come_back() -> None:
    """A restart longer than all pauses. The first server is known to the client, so its address is right."""
    async with contextlib.AsyncExitStack() as exits:
        listen = f"127.0.0.1:{exits.enter_context(reserved_port())}"
        async with running_system(decoder_listen=listen) as first:
            client = await exits.enter_async_context(lookonce.AsyncClient.connect(listen, timeout_s=60))
            sync = exits.enter_context(lookonce.Client.connect(listen, timeout_s=60))
            await client.generate("warm")
            await asyncio.to_thread(sync.generate, "warm")
            assert num_calls(first) == 2

        async def generate() -> str:
            return (await client.generate("one")).text

        async def stream() -> str:
            return "".join([piece async for piece in client.stream("two")])

        async def generate_sync() -> str:
            return (await asyncio.to_thread(sync.generate, "three")).text

        waiting = [asyncio.create_task(work) for work in (generate(), stream(), generate_sync())]
        await asyncio.sleep(1.5)
        assert not any(task.done() for task in waiting), [task.exception() for task in waiting if task.done()]
        async with running_system(decoder_listen=listen):
            assert await asyncio.gather(*waiting) == ["one +0", "two +0", "three +0"]


async def test_a_deadline_that_passes_names_the_failure_before() -> None:
    async def check(call: Any) -> None:
        async with running_system() as system:
            system.decoder.failures = [UnavailableError("the first one was refused")]
            system.decoder.delay_s = 300.0
            with pytest.raises(DeadlineError, match="the first one was refused"):
                await call(system.decoder_target, timeout_s=5)

    # At the same time, because both wait for their deadlines.
    await asyncio.gather(check(generated), check(streamed_sync))


async def test_a_pause_ends_with_the_client(system: System) -> None:
    for kind in (lookonce.AsyncClient, lookonce.Client):
        client = kind.connect(system.decoder_target, timeout_s=None)
        system.decoder.failures = [OverloadedError("full", retry_after_s=50.0)]
        work = client.generate("x") if kind is lookonce.AsyncClient else asyncio.to_thread(client.generate, "x")
        task = asyncio.create_task(work)  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            while system.decoder.failures:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            await (client.aclose() if isinstance(client, lookonce.AsyncClient) else asyncio.to_thread(client.close))
            with pytest.raises(AbortedError):
                await task


@pytest.mark.parametrize("error", [UnavailableError(REFUSED), InternalError("broken"), OverloadedError("full")])
@pytest.mark.usefixtures("short_pauses")
@every_call
async def test_a_failed_call_leaves_no_cycle_that_keeps_its_images(
    system: System, call: Any, error: LookonceError
) -> None:
    """The error, with its traceback, the frames and so the request, would stay until the next garbage collection."""
    error.retry_after_s = 0.01
    system.decoder.failures = [error] * 3
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(type(error)):
            await call(system.decoder_target)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [one for one in gc.garbage if isinstance(one, LookonceError | decoder_pb2.GenerateParams)]
        assert not kept
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("max_retries", [-1, 1.5, True, "2", None])
@pytest.mark.parametrize("connect", [lookonce.Client.connect, lookonce.AsyncClient.connect])
def test_only_whole_numbers_of_retries(connect: Callable[..., object], max_retries: Any) -> None:
    with pytest.raises(InvalidParameterError, match="max_retries"):
        connect("127.0.0.1:1", max_retries=max_retries)


class Clock:
    """The monotonic clock of the module, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("lookonce.sdk.retries.time.monotonic", lambda: self.now_s)


def test_retries_of_a_fleet_that_is_down_are_a_fifth_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 calls a second, and then 1,000, all of which fail."""
    clock = Clock(monkeypatch)
    client = Retries()
    for rate, expected in ((5, 2.0), (1000, 0.21)):
        num_retries = num_calls = 0
        for second in range(120):
            for _ in range(rate):
                clock.now_s += 1 / rate
                attempts = client.attempts(Deadline(None), 2)
                while attempts.pause_s(UnavailableError("down")) is not None:
                    num_retries += second >= 20
                num_calls += second >= 20
        assert num_retries / num_calls == pytest.approx(expected, rel=0.01)


def test_a_replica_may_end_with_hundreds_of_calls_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    budget = RetryBudget()
    for _ in range(10_000):
        budget.note_call()
    assert sum(budget.take() for _ in range(1000)) == 500


@given(st.integers(0, 6), st.integers(0, 2**32), st.lists(st.none() | st.floats(0.0, 50.0), min_size=8, max_size=8))
def test_pauses_are_random_up_to_a_limit_that_doubles_and_no_shorter_than_advised(
    max_retries: int, seed: int, advice: list[float | None]
) -> None:
    random.seed(seed)
    attempts = Attempts(Retries(), Deadline(None), max_retries)
    for index, advised_s in enumerate(advice):
        error = UnavailableError("down", retry_after_s=advised_s)
        pause_s = attempts.pause_s(error)
        if index >= max_retries:
            assert pause_s is None
            continue
        assert pause_s is not None
        assert (advised_s or 0.0) <= pause_s <= max(1.21 * (advised_s or 0.0), min(8.0, 0.2 * 2**index))


@every_call
async def test_a_failed_call_says_its_id_code_and_reason(system: System, call: Any) -> None:
    system.decoder.failures = [OverloadedError("full", retry_after_s=99.0)]
    with pytest.raises(OverloadedError) as caught:
        await call(system.decoder_target)
    error = caught.value
    assert (error.code, error.reason, error.retry_after_s) == ("RESOURCE_EXHAUSTED", "OVERLOADED", 99.0)
    assert error.request_id == system.knowledge.metadata["x-request-id"]
    with pytest.raises(UnavailableError) as caught_here:
        await call("127.0.0.1:1")
    assert len(caught_here.value.request_id or "") == 32, "the call has an id also if no server has seen it"
