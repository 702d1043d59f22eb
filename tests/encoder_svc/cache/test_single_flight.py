"""A key has one task, and none of its callers owns it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import weakref

import pytest

from encoder_svc.cache.single_flight import Flight, SingleFlight


async def test_everybody_gets_the_one_result() -> None:
    flights: SingleFlight[int] = SingleFlight()
    gate = asyncio.Event()

    async def work(flight: Flight) -> int:
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

    async def work(flight: Flight) -> int:
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

    async def fail(flight: Flight) -> int:
        await asyncio.sleep(0)
        raise ValueError("once")

    async def succeed(flight: Flight) -> int:
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

    async def fail(flight: Flight) -> int:
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

    async def hang(flight: Flight) -> int:
        await asyncio.Event().wait()
        return 0

    caller = asyncio.create_task(flights.start("key", hang))
    await asyncio.sleep(0)
    await flights.close()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(flights) == 0


class Bytes:
    """A stand-in for an image file, whose end can be seen."""


async def idle() -> None:
    """Lets every task run until it waits again."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_work_that_waits_is_dropped_with_its_arguments_when_the_last_caller_leaves() -> None:
    flights: SingleFlight[int] = SingleFlight()

    async def work(flight: Flight, data: Bytes) -> int:
        with flight.waiting():
            await asyncio.Event().wait()
        return 0

    data = Bytes()
    reference = weakref.ref(data)
    callers = [asyncio.create_task(flights.start("key", work, data))]
    del data
    await idle()
    callers.append(asyncio.create_task(flights.join("key")))
    await idle()
    gc.disable()
    try:
        callers.pop(0).cancel()
        await idle()
        assert reference() is not None, "the other caller still waits"
        callers.pop().cancel()
        await idle()
        assert (reference(), len(flights), "key" in flights) == (None, 0, False)
    finally:
        gc.enable()


async def test_work_that_is_dropped_with_an_error_leaves_nothing_in_memory_once_its_callers_have_it() -> None:
    flights: SingleFlight[int] = SingleFlight()
    entered: list[Flight] = []

    async def work(flight: Flight, data: Bytes) -> int:
        entered.append(flight)
        with flight.waiting():
            await asyncio.Event().wait()
        return 0

    async def ask(data: Bytes) -> str:
        try:
            return str(await flights.start("key", work, data))
        except ValueError as error:
            return str(error)

    data = Bytes()
    reference = weakref.ref(data)
    callers = [asyncio.create_task(ask(data))]
    del data
    await idle()
    gc.disable()
    try:
        assert entered[0].drop(ValueError("no place"))
        assert "key" not in flights
        assert not entered.pop().drop(), "it is dropped already"
        await idle()
        assert callers.pop().result() == "no place"
        await idle()
        assert (reference(), len(flights)) == (None, 0)
    finally:
        gc.enable()


async def test_work_that_runs_goes_on_without_callers_until_it_waits() -> None:
    flights: SingleFlight[int] = SingleFlight()
    is_decoded, is_over = asyncio.Event(), asyncio.Event()

    async def work(flight: Flight) -> int:
        try:
            await is_decoded.wait()
            with flight.waiting():
                await asyncio.Event().wait()
            return 0
        finally:
            is_over.set()

    caller = asyncio.create_task(flights.start("key", work))
    await idle()
    caller.cancel()
    await idle()
    assert "key" in flights
    is_decoded.set()
    await idle()
    assert (is_over.is_set(), len(flights)) == (True, 0)


async def test_a_caller_who_comes_while_work_without_callers_runs_keeps_it() -> None:
    flights: SingleFlight[int] = SingleFlight()
    is_decoded = asyncio.Event()

    async def work(flight: Flight) -> int:
        await is_decoded.wait()
        with flight.waiting():
            await asyncio.sleep(0)
        return 7

    first = asyncio.create_task(flights.start("key", work))
    await idle()
    first.cancel()
    await idle()
    second = asyncio.create_task(flights.join("key"))
    await idle()
    is_decoded.set()
    assert await second == 7


async def test_a_wait_that_cannot_be_ended_any_more_lets_the_work_go_on() -> None:
    flights: SingleFlight[int] = SingleFlight()
    is_encoded = asyncio.Event()
    results: list[int] = []

    async def work(flight: Flight) -> int:
        with flight.waiting(lambda: False):
            await is_encoded.wait()
        results.append(7)
        return 7

    caller = asyncio.create_task(flights.start("key", work))
    await idle()
    caller.cancel()
    await idle()
    assert "key" in flights
    is_encoded.set()
    await idle()
    assert results == [7]


@pytest.mark.parametrize("seed", range(30))
async def test_whoever_joins_and_leaves_each_key_runs_once_at_a_time_and_every_patient_caller_is_answered(
    seed: int,
) -> None:
    rng = random.Random(seed)
    flights: SingleFlight[int] = SingleFlight()
    running: set[str] = set()
    numbers = itertools.count()
    # The flights that wait and run, and the callers that still want an answer.
    steps: list[asyncio.Future[None]] = []
    callers: list[asyncio.Task[int]] = []

    async def step() -> None:
        steps.append(asyncio.get_running_loop().create_future())
        await steps[-1]

    async def work(flight: Flight, key: str) -> int:
        with flight.waiting():
            await step()
        assert key not in running, "two flights of one key are past their wait"
        running.add(key)
        await step()
        running.discard(key)
        with flight.waiting():
            await step()
        return next(numbers)

    async def ask(key: str) -> int:
        return await (flights.join(key) if key in flights else flights.start(key, work, key))

    for _ in range(300):
        choice = rng.random()
        key = rng.choice("ab")
        if choice < 0.35:
            callers.append(asyncio.create_task(ask(key)))
        elif choice < 0.6 and callers:
            callers.pop(rng.randrange(len(callers))).cancel()
        elif steps:
            waiting = steps.pop(rng.randrange(len(steps)))
            if not waiting.done():
                waiting.set_result(None)
        if rng.random() < 0.5:
            await idle()
            assert len(flights) <= 2
    while any(not task.done() for task in callers) or len(flights):
        for waiting in steps:
            if not waiting.done():
                waiting.set_result(None)
        await idle()
    assert all(isinstance(task.result(), int) for task in callers)
    assert not running


async def test_thousands_of_callers_hear_of_an_end_in_turns_with_those_of_other_flights() -> None:
    flights: SingleFlight[str] = SingleFlight()
    gate = asyncio.Event()
    heard: list[str] = []

    async def work(flight: Flight, key: str) -> str:
        await gate.wait()
        return key

    async def ask(key: str) -> None:
        heard.append(await (flights.join(key) if key in flights else flights.start(key, work, key)))

    callers = [asyncio.create_task(ask("a")) for _ in range(4000)]
    callers += [asyncio.create_task(ask("b")) for _ in range(3)]
    await idle()
    gate.set()
    most = 0
    while len(heard) < len(callers):
        num_before = len(heard)
        await asyncio.sleep(0)
        most = max(most, len(heard) - num_before)
    assert most <= 2 * 16
    assert max(index for index, key in enumerate(heard) if key == "b") < 32
    await asyncio.gather(*callers)
