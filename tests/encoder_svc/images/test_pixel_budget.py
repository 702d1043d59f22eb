"""Waiting pixels stay inside their budget whoever leaves, and no image waits while there is budget for it."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from encoder_svc.images.pixel_budget import PixelBudget
from lookonce.turns.cost_turns import TurnRequest
from lookonce.turns.fair_queue import CallerId

HANG_S = 30.0
ONE = TurnRequest(CallerId("tenant", "a"), 0, 1)


_numbers = itertools.count()


class Image:
    """One image that waits for a reservation, is prepared, and is encoded, each step when its event is set."""

    def __init__(self, budget: PixelBudget, num_bytes: int, caller: str = "a", number: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.request = TurnRequest(CallerId("tenant", caller), next(_numbers) if number is None else number, 1)
        self.is_in = asyncio.Event()
        self.is_prepared, self.is_encoded = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._pass_through(budget))

    async def _pass_through(self, budget: PixelBudget) -> None:
        async with budget.reserved(self.request) as reservation:
            self.is_in.set()
            await self.is_prepared.wait()
            reservation.charge(self.num_bytes)
            await self.is_encoded.wait()


async def idle() -> None:
    """Lets every task run until it waits again."""
    for _ in range(10):
        await asyncio.sleep(0)


def num_in(images: list[Image]) -> int:
    return sum(one.is_in.is_set() for one in images)


async def test_images_wait_while_others_hold_the_budget_and_enter_in_their_order() -> None:
    budget = PixelBudget(max_bytes=10, max_preparing=2)
    images = [Image(budget, 10) for _ in range(6)]
    await idle()
    assert num_in(images) == 2, "as many as are prepared at a time"
    for one in images[:2]:
        one.is_prepared.set()
    await idle()
    assert budget.num_bytes == 20
    assert num_in(images) == 2, "the budget is used up"
    images[0].is_encoded.set()
    await idle()
    assert num_in(images) == 2, "and still is"
    images[1].is_encoded.set()
    await idle()
    assert [one.is_in.is_set() for one in images] == [True, True, True, True, False, False]
    for one in images:
        one.is_prepared.set()
        one.is_encoded.set()
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(one.task for one in images))
    assert budget.num_bytes == 0


async def test_a_caller_with_many_images_does_not_delay_others_by_all_of_them() -> None:
    budget = PixelBudget(max_bytes=10, max_preparing=1)
    many = [Image(budget, 10, "many") for _ in range(10)]
    await idle()
    few = [Image(budget, 10, "few"), Image(budget, 10, "few")]
    came: list[str] = []
    for _ in range(4):
        await idle()
        (inside,) = [one for one in (*many, *few) if one.is_in.is_set() and not one.task.done()]
        came.append(inside.request.caller.request_id)
        inside.is_prepared.set()
        inside.is_encoded.set()
    assert came == ["many", "many", "few", "many"]
    for one in (*many, *few):
        one.task.cancel()


async def test_an_image_that_was_asked_for_earlier_goes_before_its_callers_later_ones() -> None:
    budget = PixelBudget(max_bytes=10, max_preparing=1)
    first = Image(budget, 1)
    await idle()
    late, early = Image(budget, 1, number=9_000_001), Image(budget, 1, number=9_000_000)
    await idle()
    first.task.cancel()
    await idle()
    assert (early.is_in.is_set(), late.is_in.is_set()) == (True, False)
    for one in (early, late):
        one.task.cancel()


async def test_an_image_larger_than_the_budget_is_let_in_alone() -> None:
    budget = PixelBudget(max_bytes=10, max_preparing=4)
    images = [Image(budget, 1000)]
    await idle()
    images[0].is_prepared.set()
    await idle()
    images.append(Image(budget, 1))
    await idle()
    assert num_in(images) == 1
    images[0].is_encoded.set()
    await idle()
    assert num_in(images) == 2
    images[1].task.cancel()


async def test_an_image_that_cannot_be_prepared_returns_its_reservation() -> None:
    budget = PixelBudget(max_bytes=10, max_preparing=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="no image"):
            async with budget.reserved(ONE):
                raise ValueError("no image")
    async with asyncio.timeout(HANG_S), budget.reserved(ONE) as reservation:
        reservation.charge(3)
        assert budget.num_bytes == 3
    assert budget.num_bytes == 0


@pytest.mark.parametrize("seed", range(30))
async def test_no_image_waits_while_there_is_budget_after_any_cancellation(seed: int) -> None:
    rng = random.Random(seed)
    budget = PixelBudget(max_bytes=20, max_preparing=3)
    images: list[Image] = []
    for _ in range(200):
        choice = rng.random()
        if choice < 0.4 or not images:
            images.append(Image(budget, rng.randrange(1, 12), rng.choice("abc")))
        elif choice < 0.6:
            rng.choice(images).task.cancel()
        elif choice < 0.8:
            rng.choice(images).is_prepared.set()
        else:
            rng.choice(images).is_encoded.set()
        if rng.random() < 0.5:
            await idle()
            held = [one for one in images if one.is_in.is_set() and not one.task.done()]
            prepared = sum(one.num_bytes for one in held if one.is_prepared.is_set())
            preparing = sum(not one.is_prepared.is_set() for one in held)
            assert budget.num_bytes == prepared < 20 + 3 * 12
            is_waiting = any(not one.is_in.is_set() and not one.task.done() for one in images)
            assert not (is_waiting and preparing < 3 and prepared < 20)
    for one in images:
        one.is_prepared.set()
        one.is_encoded.set()
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(one.task for one in images), return_exceptions=True)
    assert budget.num_bytes == 0
