"""Items of calls take turns by tenant, few begin in a pass of the event loop, and no place is lost, whoever leaves."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from lookonce.turns.fair_queue import CallerId
from lookonce.turns.item_turns import ItemTurns, Place

TIMEOUT_S = 30
NUM_PLACES = 4
A, B = CallerId("a", "one"), CallerId("b", "one")


class Bench:
    """Items that note that they have begun, and wait for `gate`; it is open at first."""

    def __init__(self) -> None:
        self.turns = ItemTurns(NUM_PLACES)
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun: list[str] = []

    async def item(self, name: str, place: Place) -> str:
        self.begun.append(name)
        await self.gate.wait()
        return name

    async def call(self, caller: CallerId, names: Sequence[str]) -> list[str | BaseException]:
        """Runs one item for each name."""
        return await self.turns.run_all(caller, [functools.partial(self.item, name) for name in names])

    def flood(self, num_calls: int = 200) -> list[asyncio.Task[list[str | BaseException]]]:
        """Begins calls of one tenant with 64 items each."""
        return [
            asyncio.create_task(self.call(CallerId("a", str(number)), [f"a{number}"] * 64))
            for number in range(num_calls)
        ]


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def idle() -> None:
    """Lets every task run until it waits again."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ended(tasks: Sequence[asyncio.Task[list[str | BaseException]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_results_and_errors_come_in_order(bench: Bench) -> None:
    fault = ValueError("bad")

    async def fail(place: Place) -> str:
        raise fault

    items: list[Callable[[Place], Coroutine[Any, Any, str]]] = [
        functools.partial(bench.item, str(number)) for number in range(20)
    ]
    assert await bench.turns.run_all(A, [*items, fail]) == [*map(str, range(20)), fault]
    assert bench.begun == [str(number) for number in range(20)]


async def test_an_error_that_ends_all_cancels_what_has_begun_and_begins_no_more(bench: Bench) -> None:
    cancelled = []

    async def wait(place: Place) -> str:
        place.give_back()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(place)
            raise
        return "never"

    async def fail(place: Place) -> str:
        place.give_back()
        await idle()
        raise KeyError("all")

    rest: list[Callable[[Place], Coroutine[Any, Any, str]]] = [
        functools.partial(bench.item, str(number)) for number in range(1000)
    ]
    results = await bench.turns.run_all(A, [wait, fail, wait, *rest], ends_all=(KeyError,))
    assert [type(result) for result in results[:3]] == [asyncio.CancelledError, KeyError, asyncio.CancelledError]
    assert len(cancelled) == 2
    assert len(bench.begun) < 1000
    # Other calls have all places.
    assert await bench.turns.run_all(A, rest[:20]) == [str(number) for number in range(20)]


async def test_an_item_alone_has_a_place_and_gives_it_back(bench: Bench) -> None:
    fault = ValueError("bad")

    async def fail(place: Place) -> str:
        assert bench.turns._num_free == NUM_PLACES - 1
        raise fault

    assert await bench.turns.run_one(A, functools.partial(bench.item, "a")) == "a"
    assert await bench.turns.run_one(A, fail, 16) is fault
    bench.gate.clear()
    calls = [asyncio.create_task(bench.turns.run_one(A, functools.partial(bench.item, "a"))) for _ in range(10)]
    await idle()
    assert len(bench.begun) == 1 + NUM_PLACES
    for call in calls:
        call.cancel()
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*calls, return_exceptions=True))
    assert bench.turns._num_free == NUM_PLACES


async def test_few_items_begin_in_a_pass_of_the_event_loop(bench: Bench) -> None:
    calls = bench.flood()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(bench.begun) <= NUM_PLACES
    for _ in range(50):
        num_before = len(bench.begun)
        await asyncio.sleep(0)
        assert len(bench.begun) - num_before <= 1
    assert len(bench.begun) >= 10
    await ended(calls)


async def test_an_item_of_another_tenant_begins_before_the_backlog(bench: Bench) -> None:
    calls = bench.flood()
    await idle()
    num_before = len(bench.begun)
    await bench.call(B, ["b"])
    assert bench.begun.index("b") - num_before <= NUM_PLACES
    await ended(calls)


async def test_calls_of_a_tenant_take_turns(bench: Bench) -> None:
    calls = bench.flood(10)
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*calls)
    assert len(bench.begun) == 10 * 64
    for end in range(len(bench.begun)):
        counts = [bench.begun[:end].count(f"a{number}") for number in range(10)]
        # The first call finds all places free.
        assert max(counts) - min(counts) <= NUM_PLACES + 1 or max(counts) == 64


async def test_a_costly_item_takes_the_turns_of_many_small_ones(bench: Bench) -> None:
    bench.gate.clear()
    first = [asyncio.create_task(bench.call(B, ["b"])) for _ in range(NUM_PLACES)]
    await idle()
    calls = [
        asyncio.create_task(
            bench.turns.run_all(CallerId(name, str(number)), [functools.partial(bench.item, name)], [cost])
        )
        for name, cost, num_calls in (("costly", 16, 4), ("small", 1, 48))
        for number in range(num_calls)
    ]
    await idle()
    bench.gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*first, *calls)
    begun = bench.begun[NUM_PLACES:]
    # Each costly item waits for about as many small ones as it costs.
    third = [index for index, name in enumerate(begun) if name == "costly"][2]
    assert 16 <= begun[:third].count("small") <= 48


async def test_what_has_not_begun_has_no_task(bench: Bench) -> None:
    bench.gate.clear()
    calls = bench.flood(10)
    num_before = len(asyncio.all_tasks())
    await idle()
    assert len(bench.begun) == NUM_PLACES
    assert len(asyncio.all_tasks()) - num_before == NUM_PLACES
    await ended(calls)


async def test_an_item_that_leaves_its_place_holds_up_nobody(bench: Bench) -> None:
    bench.gate.clear()

    async def wait(place: Place) -> None:
        async with place.left():
            await bench.gate.wait()

    waiting = asyncio.create_task(bench.turns.run_all(A, [wait] * 64))
    async with asyncio.timeout(TIMEOUT_S), bench.turns.place(B):
        bench.gate.set()
    assert await waiting == [None] * 64
    assert bench.turns._num_free == NUM_PLACES


async def test_a_cancelled_call_leaves_the_queue_and_cancels_its_items(bench: Bench) -> None:
    bench.gate.clear()
    calls = bench.flood(10)
    await idle()
    assert len(bench.turns._grants._waiting) == 10
    for call in calls:
        call.cancel()
    await asyncio.wait(calls, timeout=TIMEOUT_S)
    await idle()
    assert (len(bench.turns._grants._waiting), bench.turns._num_free) == (0, NUM_PLACES)
    bench.gate.set()
    assert await bench.call(B, ["b"]) == ["b"]


@pytest.mark.parametrize("seed", range(5))
async def test_no_place_is_lost_whenever_calls_are_cancelled(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    calls = bench.flood(20)
    for call in chance.sample(calls, 15):
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
        call.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*calls, return_exceptions=True)
    await idle()
    assert bench.turns._num_free == NUM_PLACES
    assert not bench.turns._grants._waiting
