"""An image that is ready waits for the earlier ones of its caller, for no others, and not for long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import Sequence

import pytest

from lookonce.turns import caller_order
from lookonce.turns.caller_order import CallerOrder, Turn

HANG_S = 30.0


async def order_of(images: Sequence[tuple[str, asyncio.Event]], ready: Sequence[int]) -> list[int]:
    """Returns the indexes of images in the order in which they go on.

    `images`: (caller, event of being ready) in the order of asking. `ready`: indexes in the order of the events.
    """
    order: CallerOrder[str] = CallerOrder()
    gone: list[int] = []

    async def one(index: int) -> None:
        caller, event = images[index]
        with order.entered(caller) as turn:
            await event.wait()
            await turn.wait()
            gone.append(index)
            turn.pass_on()

    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
        for index in range(len(images)):
            tasks.create_task(one(index))
        for index in ready:
            images[index][1].set()
            # Lets every task run until it waits again.
            for _ in range(5):
                await asyncio.sleep(0)
    return gone


def test_a_caller_that_always_has_one_more_keeps_none_of_those_that_are_gone() -> None:
    def num_turns() -> int:
        gc.collect()
        return sum(type(one) is Turn for one in gc.get_objects())

    order: CallerOrder[str] = CallerOrder()
    num_before = num_turns()
    latest = contextlib.ExitStack()
    latest.enter_context(order.entered("a"))
    for _ in range(100):
        following = contextlib.ExitStack()
        following.enter_context(order.entered("a"))
        latest.close()
        latest = following
    assert num_turns() - num_before <= 2
    latest.close()


def test_thousands_of_images_of_one_caller_take_memory_in_proportion() -> None:
    def peak(num_images: int) -> int:
        order: CallerOrder[str] = CallerOrder()
        tracemalloc.start()
        with contextlib.ExitStack() as held:
            for _ in range(num_images):
                held.enter_context(order.entered("a"))
            size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(4000) < 8 * peak(1000)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes waits so long that none ends early on a slow machine."""
    monkeypatch.setattr(caller_order, "_MAX_WAIT_S", HANG_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ready", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
async def test_one_caller_s_images_go_on_in_the_order_of_asking(ready: Sequence[int]) -> None:
    assert await order_of([("a", asyncio.Event()) for _ in range(4)], ready) == [0, 1, 2, 3]


@pytest.mark.usefixtures("patient")
async def test_callers_do_not_wait_for_each_other() -> None:
    images = [(caller, asyncio.Event()) for caller in "aabb"]
    assert await order_of(images, (3, 1, 2, 0)) == [2, 3, 0, 1]


@pytest.mark.usefixtures("patient")
async def test_later_images_do_not_wait_for_one_that_failed() -> None:
    order: CallerOrder[str] = CallerOrder()

    async def fails() -> None:
        with order.entered("a"):
            await asyncio.sleep(0)
            raise ValueError

    async def waits() -> None:
        with order.entered("a") as turn:
            await turn.wait()

    async with asyncio.timeout(HANG_S / 2):
        found = await asyncio.gather(fails(), waits(), return_exceptions=True)
    assert isinstance(found[0], ValueError)
    assert found[1] is None


async def test_a_wait_for_earlier_images_is_short() -> None:
    order: CallerOrder[str] = CallerOrder()
    with order.entered("a"), order.entered("a") as turn:
        async with asyncio.timeout(HANG_S):
            await turn.wait()


async def test_numbers_say_the_order_over_all_callers() -> None:
    order: CallerOrder[str] = CallerOrder()
    with order.entered("a") as first, order.entered("b") as second, order.entered("a") as third:
        assert first.number < second.number < third.number
