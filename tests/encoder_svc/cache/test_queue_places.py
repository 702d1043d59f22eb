"""Tenants that compete for places get equal numbers, one alone gets all, and nobody is refused without need."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from encoder_svc.cache.queue_places import QueuePlaces
from encoder_svc.cache.single_flight import Flight, SingleFlight
from lookonce.errors import OverloadedError


class Queue:
    """Images in a queue of a few places. Each waits until it is begun, and leaves when it is finished."""

    def __init__(self, max_images: int) -> None:
        self.places = QueuePlaces(max_images)
        self.flights: SingleFlight[None] = SingleFlight()
        self.images: list[Image] = []

    def add(self, tenant: str, num_images: int = 1) -> list[Image]:
        added = [Image(self, tenant, len(self.images) + index) for index in range(num_images)]
        self.images += added
        return added

    @property
    def num_images(self) -> Counter[str]:
        """The number of images of each tenant that have a place."""
        return Counter(image.tenant for image in self.images if image.is_in)


class Image:
    """One image and its caller."""

    def __init__(self, queue: Queue, tenant: str, number: int) -> None:
        self.queue = queue
        self.tenant = tenant
        self.is_in = False
        self.is_begun, self.is_finished = asyncio.Event(), asyncio.Event()
        self.caller = asyncio.create_task(queue.flights.start(number, self._pass_through))

    async def _pass_through(self, flight: Flight) -> None:
        with self.queue.places.taken(self.tenant, flight):
            self.is_in = True
            try:
                with flight.waiting():
                    await self.is_begun.wait()
                await self.is_finished.wait()
            finally:
                self.is_in = False

    @property
    def is_refused(self) -> bool:
        return self.caller.done() and isinstance(self.caller.exception(), OverloadedError)


async def idle() -> None:
    """Lets every task run until it waits again."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_tenant_alone_gets_all_places_and_its_last_image_is_refused() -> None:
    queue = Queue(4)
    images = queue.add("a", 5)
    await idle()
    assert [image.is_refused for image in images] == [False] * 4 + [True]
    with pytest.raises(OverloadedError, match="4 images wait"):
        await images[4].caller


async def test_another_tenant_gets_a_place_of_the_one_with_the_most_whose_newest_image_is_refused() -> None:
    queue = Queue(5)
    many, few = queue.add("a", 4), queue.add("b", 1)
    await idle()
    newcomer = queue.add("c", 1)
    await idle()
    assert queue.num_images == {"a": 3, "b": 1, "c": 1}
    assert [image.is_refused for image in (*many, *few, *newcomer)] == [False] * 3 + [True, False, False]
    with pytest.raises(OverloadedError, match="5 images are taken, 4 of them by your tenant") as caught:
        await many[3].caller
    assert caught.value.retry_after_s > 0
    assert len(queue.places) == 5


async def test_tenants_that_compete_come_to_equal_numbers_and_then_push_nobody_out() -> None:
    queue = Queue(6)
    first = queue.add("a", 6)
    await idle()
    second = queue.add("b", 6)
    await idle()
    assert queue.num_images == {"a": 3, "b": 3}
    assert [image.is_refused for image in (*first, *second)] == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3
    queue.add("a", 3)
    await idle()
    assert [image.is_in for image in second] == [True] * 3 + [False] * 3


async def test_an_image_that_is_being_worked_on_is_not_pushed_out() -> None:
    queue = Queue(3)
    images = queue.add("a", 3)
    await idle()
    images[2].is_begun.set()
    await idle()
    queue.add("b")
    await idle()
    assert [image.is_refused for image in images] == [False, True, False]
    images[0].is_begun.set()
    await idle()
    late = queue.add("c")
    await idle()
    assert late[0].is_refused, "nothing waits that could make room"
    images[2].is_finished.set()
    await images[2].caller


@pytest.mark.parametrize("seed", range(20))
async def test_any_traffic_keeps_the_bound_and_refuses_only_who_has_no_less_than_others(seed: int) -> None:
    rng = random.Random(seed)
    queue = Queue(8)
    for _ in range(300):
        choice = rng.random()
        inside = [image for image in queue.images if image.is_in]
        if choice < 0.6 or not inside:
            tenant = rng.choice("aaaabc")
            before = queue.num_images
            (image,) = queue.add(tenant)
            await idle()
            if image.is_refused:
                waiting = Counter(other.tenant for other in inside if not other.is_begun.is_set())
                assert sum(before.values()) == 8
                assert all(before[other] <= before[tenant] + 1 for other in waiting)
        elif choice < 0.7:
            rng.choice(inside).caller.cancel()
        elif choice < 0.85:
            rng.choice(inside).is_begun.set()
        else:
            leaving = rng.choice(inside)
            leaving.is_begun.set()
            leaving.is_finished.set()
        await idle()
        assert len(queue.places) == sum(queue.num_images.values()) <= 8
    for image in queue.images:
        image.is_begun.set()
        image.is_finished.set()
    await asyncio.gather(*(image.caller for image in queue.images), return_exceptions=True)
    await idle()
    assert (len(queue.places), queue.places._places) == (0, {})
