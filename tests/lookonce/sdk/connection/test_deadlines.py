"""Deadlines of the clients: numbers that none can have are refused, and infinity means no deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

import lookonce
from lookonce.errors import AbortedError, DeadlineError, InvalidParameterError
from lookonce.sdk.connection.channel import ConnectionOptions, Deadline
from tests.lookonce.sdk.sdk_servers import System, running_system

CLIENTS = [lookonce.Client, lookonce.AsyncClient]
ALL_CLIENTS = [*CLIENTS, lookonce.AdminClient, lookonce.AsyncAdminClient]
UNUSABLE: list[Any] = [math.nan, 0, 0.0, -1.0, -math.inf, "5"]
# Longer than gRPC's own limit, and so long that gRPC would take it for a deadline in the past.
CENTURIES = [3e8, 1e10, 1e300]


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as started:
        yield started


async def called(client: Any, method: str, *arguments: Any, **options: Any) -> Any:
    """Makes the same call with either kind of client; reads a stream to its end."""
    if isinstance(client, lookonce.AsyncClient | lookonce.AsyncAdminClient):
        result = getattr(client, method)(*arguments, **options)
        return [piece async for piece in result] if method == "stream" else await result
    result = await asyncio.to_thread(getattr(client, method), *arguments, **options)
    return await asyncio.to_thread(list, result) if method == "stream" else result


async def closed(client: Any) -> None:
    if isinstance(client, lookonce.AsyncClient | lookonce.AsyncAdminClient):
        await client.aclose()
    else:
        client.close()


@pytest.mark.parametrize("kind", CLIENTS)
async def test_infinity_is_no_deadline_and_centuries_are_a_long_one(kind: Any, system: System) -> None:
    client = kind.connect(system.decoder_target, timeout_s=30.0)
    for timeout_s in (math.inf, *CENTURIES):
        system.knowledge.calls.clear()
        assert (await called(client, "generate", "one", timeout_s=timeout_s)).text == "one +0"
        assert await called(client, "stream", "one", timeout_s=timeout_s) == ["one", " +0"]
        assert await called(client, "lookup", [b"x"], timeout_s=timeout_s) == [False]
        left_s = [left for method, _, left in system.knowledge.calls if method != "GetModelInfo"]
        assert len(left_s) == 3
        # A server without a deadline sees None or a time that no clock reaches.
        assert all(left is None or left > 9e7 for left in left_s)
    await closed(client)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("timeout_s", [None, math.inf])
async def test_a_client_may_have_no_deadline_of_its_own(kind: Any, timeout_s: float | None, system: System) -> None:
    client = kind.connect(system.decoder_target, timeout_s=timeout_s)
    large = b"\x01" * 70_000
    # Its bytes are sent only after a look-up and a second request, all of them without a deadline.
    assert (await called(client, "generate", "one", images=[large])).text == "one +1"
    system.decoder.max_message_bytes = 1000
    other = kind.connect(system.decoder_target, timeout_s=timeout_s)
    assert (await called(other, "generate", "one", images=[b"\x02" * 70_000], timeout_s=None)).text == "one +1"
    assert system.knowledge.count("Encode") == 1
    assert all(left is None or left > 9e7 for _, _, left in system.knowledge.calls)
    await closed(client)
    await closed(other)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_none_is_the_clients_default(kind: Any, system: System) -> None:
    client = kind.connect(system.decoder_target, timeout_s=30.0)
    await called(client, "generate", "one", timeout_s=None)
    await called(client, "stream", "one", timeout_s=None)
    await called(client, "encode", [b"x"], timeout_s=None)
    assert all(20 < left < 31 for _, _, left in system.knowledge.calls)
    await closed(client)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("timeout_s", UNUSABLE)
async def test_a_deadline_that_none_can_have_is_refused_before_anything_is_sent(
    kind: Any, timeout_s: Any, system: System
) -> None:
    client = kind.connect(system.decoder_target, system.encoder_target)
    calls = (("generate", "x"), ("stream", "x"), ("encode", [b"x"]), ("lookup", [b"x"]))
    for method, argument in calls:
        with pytest.raises(InvalidParameterError, match="timeout_s: must be a number of seconds above 0"):
            await called(client, method, argument, timeout_s=timeout_s)
    assert system.knowledge.calls == []
    await closed(client)


@pytest.mark.parametrize("kind", ALL_CLIENTS)
@pytest.mark.parametrize("timeout_s", UNUSABLE)
async def test_no_client_takes_such_a_default(kind: Any, timeout_s: Any) -> None:
    with pytest.raises(InvalidParameterError, match="timeout_s"):
        kind.connect("127.0.0.1:1", timeout_s=timeout_s)


@pytest.mark.parametrize("kind", ALL_CLIENTS[2:])
async def test_operators_clients_refuse_it_in_each_call(kind: Any) -> None:
    client = kind.connect("127.0.0.1:1")
    for method, *arguments in (("evict", [b"x"]), ("evict_tenant", ""), ("evict_all",), ("pin", [b"x"]), ("stats",)):
        with pytest.raises(InvalidParameterError, match="timeout_s"):
            await called(client, method, *arguments, timeout_s=math.nan)
    await closed(client)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_the_model_s_description_has_a_deadline_like_every_call(kind: Any, system: System) -> None:
    system.decoder.info_delay_s = 60.0
    client = kind.connect(system.decoder_target, timeout_s=30.0)
    with pytest.raises(DeadlineError):
        await called(client, "model_info", timeout_s=0.3)
    for timeout_s in UNUSABLE:
        with pytest.raises(InvalidParameterError, match="timeout_s"):
            await called(client, "model_info", timeout_s=timeout_s)
    await closed(client)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_closed_client_no_longer_describes_the_model(kind: Any, system: System) -> None:
    client = kind.connect(system.decoder_target)
    assert (await called(client, "model_info")).model == "echo"
    await closed(client)
    with pytest.raises(AbortedError):
        await called(client, "model_info")


def test_a_passed_deadline_is_told_when_it_is_asked_for() -> None:
    assert Deadline.after(math.inf).remaining_s() is None
    left_s = ConnectionOptions(timeout_s=20.0).deadline(None).remaining_s()
    assert left_s is not None
    assert 0 < left_s <= 20
    with pytest.raises(DeadlineError):
        Deadline(0.0).remaining_s()
