"""Pixels that wait are bounded by their bytes, whoever leaves, and nobody waits for room that there is."""

from __future__ import annotations

import asyncio
import random

import pytest

from encoder_svc.images.prepared_room import PreparedRoom
from encoder_svc.vision.forward_queue import CallerId

HANG_S = 30.0


class Visitor:
    """One image: waits for room, is prepared, has its pixels encoded, each when it is told to."""

    def __init__(self, room: PreparedRoom, num_bytes: int, caller: str = "a") -> None:
        self.num_bytes = num_bytes
        self.caller = CallerId(caller)
        self.is_in = asyncio.Event()
        self.is_prepared, self.is_encoded = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._visit(room))

    async def _visit(self, room: PreparedRoom) -> None:
        async with room.entered(self.caller) as place:
            self.is_in.set()
            await self.is_prepared.wait()
            place.holds(self.num_bytes)
            await self.is_encoded.wait()


async def idle() -> None:
    """Whoever may go on does."""
    for _ in range(10):
        await asyncio.sleep(0)


def num_in(visitors: list[Visitor]) -> int:
    return sum(one.is_in.is_set() for one in visitors)


async def test_images_wait_while_others_hold_the_room_and_come_in_in_their_order() -> None:
    room = PreparedRoom(max_bytes=10, max_preparing=2)
    visitors = [Visitor(room, 10) for _ in range(6)]
    await idle()
    assert num_in(visitors) == 2, "as many as are prepared at a time"
    for one in visitors[:2]:
        one.is_prepared.set()
    await idle()
    assert room.num_bytes == 20
    assert num_in(visitors) == 2, "the room is full"
    visitors[0].is_encoded.set()
    await idle()
    assert num_in(visitors) == 2, "and still is"
    visitors[1].is_encoded.set()
    await idle()
    assert [one.is_in.is_set() for one in visitors] == [True, True, True, True, False, False]
    for one in visitors:
        one.is_prepared.set()
        one.is_encoded.set()
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(one.task for one in visitors))
    assert room.num_bytes == 0


async def test_a_caller_with_many_images_keeps_nobody_waiting_for_all_of_them() -> None:
    room = PreparedRoom(max_bytes=10, max_preparing=1)
    many = [Visitor(room, 10, "many") for _ in range(10)]
    await idle()
    few = [Visitor(room, 10, "few"), Visitor(room, 10, "few")]
    came: list[str] = []
    for _ in range(4):
        await idle()
        (inside,) = [one for one in (*many, *few) if one.is_in.is_set() and not one.task.done()]
        came.append(inside.caller)
        inside.is_prepared.set()
        inside.is_encoded.set()
    assert came == ["many", "many", "few", "many"]
    for one in (*many, *few):
        one.task.cancel()


async def test_an_image_larger_than_the_room_is_let_in_alone() -> None:
    room = PreparedRoom(max_bytes=10, max_preparing=4)
    visitors = [Visitor(room, 1000)]
    await idle()
    visitors[0].is_prepared.set()
    await idle()
    visitors.append(Visitor(room, 1))
    await idle()
    assert num_in(visitors) == 1
    visitors[0].is_encoded.set()
    await idle()
    assert num_in(visitors) == 2
    visitors[1].task.cancel()


async def test_an_image_that_cannot_be_prepared_leaves_its_room() -> None:
    room = PreparedRoom(max_bytes=10, max_preparing=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="no image"):
            async with room.entered(CallerId("a")):
                raise ValueError("no image")
    async with asyncio.timeout(HANG_S), room.entered(CallerId("a")) as place:
        place.holds(3)
        assert room.num_bytes == 3
    assert room.num_bytes == 0


@pytest.mark.parametrize("seed", range(30))
async def test_whoever_leaves_whenever_nobody_waits_for_room_that_there_is(seed: int) -> None:
    rng = random.Random(seed)
    room = PreparedRoom(max_bytes=20, max_preparing=3)
    visitors: list[Visitor] = []
    for _ in range(200):
        choice = rng.random()
        if choice < 0.4 or not visitors:
            visitors.append(Visitor(room, rng.randrange(1, 12), rng.choice("abc")))
        elif choice < 0.6:
            rng.choice(visitors).task.cancel()
        elif choice < 0.8:
            rng.choice(visitors).is_prepared.set()
        else:
            rng.choice(visitors).is_encoded.set()
        if rng.random() < 0.5:
            await idle()
            held = [one for one in visitors if one.is_in.is_set() and not one.task.done()]
            prepared = sum(one.num_bytes for one in held if one.is_prepared.is_set())
            preparing = sum(not one.is_prepared.is_set() for one in held)
            assert room.num_bytes == prepared < 20 + 3 * 12
            is_waiting = any(not one.is_in.is_set() and not one.task.done() for one in visitors)
            assert not (is_waiting and preparing < 3 and prepared < 20)
    for one in visitors:
        one.is_prepared.set()
        one.is_encoded.set()
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(one.task for one in visitors), return_exceptions=True)
    assert room.num_bytes == 0
