"""A key has one task, and none of its callers owns it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from encoder_svc.cache.single_flight import SingleFlight


async def test_everybody_gets_the_one_result() -> None:
    flights: SingleFlight[int] = SingleFlight()
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 7

    first = asyncio.create_task(flights.start("key", work))
    await asyncio.sleep(0)
    others = [asyncio.create_task(flights.join("key")) for _ in range(49)]
    assert "key" in flights
    gate.set()
    assert await asyncio.gather(first, *others) == [7] * 50
    assert len(flights) == 0


async def test_cancelling_callers_cancels_nothing_shared() -> None:
    flights: SingleFlight[int] = SingleFlight()
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 7

    first = asyncio.create_task(flights.start("key", work))
    await asyncio.sleep(0)
    second, third = (asyncio.create_task(flights.join("key")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.wait([first, second])
    gate.set()
    assert await third == 7


async def test_a_failure_reaches_everybody_and_the_next_attempt_starts_afresh() -> None:
    flights: SingleFlight[int] = SingleFlight()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("once")

    async def succeed() -> int:
        return 1

    first = asyncio.create_task(flights.start("key", fail))
    await asyncio.sleep(0)
    second = asyncio.create_task(flights.join("key"))
    for task in (first, second):
        with pytest.raises(ValueError, match="once"):
            await task
    assert await flights.start("key", succeed) == 1


async def test_a_failure_without_callers_is_not_reported_as_lost() -> None:
    flights: SingleFlight[int] = SingleFlight()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("nobody listens")

    caller = asyncio.create_task(flights.start("key", fail))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_closing_ends_every_flight() -> None:
    flights: SingleFlight[int] = SingleFlight()

    async def hang() -> int:
        await asyncio.Event().wait()
        return 0

    caller = asyncio.create_task(flights.start("key", hang))
    await asyncio.sleep(0)
    await flights.close()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(flights) == 0
