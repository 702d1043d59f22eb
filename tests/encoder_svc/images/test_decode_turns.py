"""Tenants share the decoding by pixels, and so do sizes of images. Whoever waits is passed by a bounded number."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Collection, Hashable
from typing import Any

import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.fair_queue import CallerId
from encoder_svc.images.decode_turns import MIN_PIXELS, DecodeRequest, DecodeTurns
from encoder_svc.images.decode_worker import DecodeWorker
from lookonce.media.image_header import ImageHeader, ImageLimits, probe_image
from tests import image_files
from tests.encoder_svc.conftest import StartEncoder
from tests.encoder_svc.encode_requests import TIMEOUT_S, png, settled, source
from tests.encoder_svc.encode_requests import request as encode_request

GIANT, SMALL = 49_000_000, 6_000
Turns = DecodeTurns[DecodeRequest]
Waiting = list[DecodeRequest]


def line(tenant: str, num_images: int, num_pixels: int, *, start: int = 0, one_call: bool = False) -> Waiting:
    """Images of one tenant, each in a call of its own unless `one_call`."""
    return [
        DecodeRequest(CallerId(tenant, str(start if one_call else number)), number, num_pixels)
        for number in range(start, start + num_images)
    ]


def put(turns: Turns, *requests: DecodeRequest) -> None:
    for request in requests:
        turns.put(request, request)


def taken(turns: Turns) -> Waiting:
    """Everything in the order of decoding."""
    return [turns.take() for _ in range(len(turns))]


def test_another_tenant_s_picture_is_next_after_any_number_of_giants() -> None:
    turns: Turns = DecodeTurns()
    put(turns, *line("a", 40, GIANT))
    begun = [turns.take().tenant for _ in range(2)]
    for number in range(100, 110):
        put(turns, *line("b", 1, SMALL, start=number))
        begun.append(turns.take().tenant)
        begun.append(turns.take().tenant)
    assert begun == ["a", "a"] + ["b", "a"] * 10


def test_of_tenants_with_equal_images_the_new_one_is_next() -> None:
    turns: Turns = DecodeTurns()
    put(turns, *line("a", 4, GIANT))
    assert turns.take().tenant == "a"
    put(turns, *line("b", 2, GIANT, start=10))
    assert [request.tenant for request in taken(turns)] == ["b", "a", "b", "a", "a"]


def test_a_tenant_that_comes_late_has_saved_up_nothing() -> None:
    turns: Turns = DecodeTurns()
    put(turns, *line("a", 10, GIANT))
    for _ in range(5):
        turns.take()
    put(turns, *line("b", 5, GIANT, start=20))
    assert [request.tenant for request in taken(turns)] == ["b", "a"] * 5


def test_a_tenant_with_many_pictures_and_one_with_giants_get_equal_pixels() -> None:
    turns: Turns = DecodeTurns()
    num_pictures = GIANT // MIN_PIXELS
    put(turns, *line("a", 4, GIANT), *line("b", 3 * num_pictures, SMALL, start=10))
    order = [request.tenant for request in taken(turns)]
    giants = [index for index, tenant in enumerate(order) if tenant == "a"]
    gaps = [later - earlier - 1 for earlier, later in itertools.pairwise(giants[:3])]
    assert all(abs(gap - num_pictures) <= 1 for gap in gaps), gaps


def test_a_tenant_s_small_picture_does_not_queue_behind_its_giants() -> None:
    turns: Turns = DecodeTurns()
    put(turns, *line("a", 40, GIANT))
    turns.take()
    put(turns, *line("a", 1, SMALL, start=50))
    assert turns.take().number == 50


def test_a_giant_waits_for_its_own_pixels_in_smaller_pictures_and_no_longer() -> None:
    turns: Turns = DecodeTurns()
    put(turns, *line("a", 1, GIANT))
    for number in range(1, 1000):
        put(turns, *line("a", 1, SMALL, start=number))
        if turns.take().num_pixels == GIANT:
            break
    assert number == GIANT // MIN_PIXELS + 1


def test_equal_images_of_a_tenant_leave_as_they_came_and_calls_with_many_take_turns() -> None:
    turns: Turns = DecodeTurns()
    put(turns, *line("a", 5, GIANT))
    assert [request.number for request in taken(turns)] == [0, 1, 2, 3, 4]
    put(turns, *line("a", 3, GIANT, start=10, one_call=True), *line("a", 2, GIANT, start=20, one_call=True))
    assert [request.number for request in taken(turns)] == [10, 20, 11, 21, 12]


def test_an_image_that_leaves_costs_its_tenant_nothing_and_leaves_nothing_behind() -> None:
    turns: Turns = DecodeTurns()
    giants = line("a", 3, GIANT)
    put(turns, *giants, *line("b", 1, GIANT, start=10))
    for request in (*giants[:2], giants[0], *line("c", 1, SMALL, start=99)):
        turns.discard(request)
    assert [request.number for request in taken(turns)] == [2, 10]
    assert not turns._tenants._members


class Model:
    """The rule, written down without regard to speed, for tenants with one call each."""

    def __init__(self) -> None:
        self.waiting: Waiting = []
        self._tenants: dict[str, int] = {}
        self._ranges: dict[str, dict[int, int]] = defaultdict(dict)

    def put(self, request: DecodeRequest) -> None:
        self._join(self._tenants, request.tenant, {one.tenant for one in self.waiting})
        ranges = {one.size_range for one in self.waiting if one.tenant == request.tenant}
        self._join(self._ranges[request.tenant], request.size_range, ranges)
        self.waiting.append(request)

    def _join(self, counts: dict[Any, int], member: Hashable, waiting: Collection[Hashable]) -> None:
        if not waiting:
            counts.clear()
        if member not in waiting:
            counts[member] = max(counts.get(member, 0), min((counts[one] for one in waiting), default=0))

    def take(self, request: DecodeRequest) -> None:
        """Checks that it is the turn of this image's tenant and range, and counts the image."""
        nexts = {tenant: self._nexts_of(tenant) for tenant in {one.tenant for one in self.waiting}}
        assert request in nexts[request.tenant]
        # Ranges with equal ends give a tenant several next images.
        ends = [max(self._tenants[tenant] + one.cost for one in images) for tenant, images in nexts.items()]
        assert self._tenants[request.tenant] + request.cost <= min(ends)
        self.waiting.remove(request)
        self._tenants[request.tenant] += request.cost
        self._ranges[request.tenant][request.size_range] += request.cost

    def _nexts_of(self, tenant: str) -> Waiting:
        """The first images of those ranges whose ends are lowest."""
        firsts = {one.size_range: one for one in reversed(self.waiting) if one.tenant == tenant}
        ends = {key: self._ranges[tenant][key] + one.cost for key, one in firsts.items()}
        return [one for key, one in firsts.items() if ends[key] == min(ends.values())]


class Passed:
    """Pixels that others got since each waiting member's last turn, or since it began to wait."""

    def __init__(self) -> None:
        self._pixels: dict[Hashable, dict[Hashable, int]] = {}
        self._largest = 0

    def wait(self, member: Hashable, cost: int) -> None:
        self._largest = max(self._largest, cost)
        self._pixels.setdefault(member, defaultdict(int))

    def turn(self, member: Hashable, cost: int, waiting: Collection[Hashable]) -> None:
        self._pixels[member].clear()
        for one in list(self._pixels):
            if one not in waiting:
                del self._pixels[one]
            elif one != member:
                self._pixels[one][member] += cost
                assert self._pixels[one][member] <= 2 * self._largest


IMAGES = st.tuples(st.sampled_from("abcd"), st.sampled_from([1, MIN_PIXELS, 600_000, 2_000_000, 12_000_000, GIANT]))


@given(st.lists(IMAGES | st.just("take"), min_size=20, max_size=120))
def test_the_order_is_the_rule_s_and_no_member_starves(steps: list[tuple[str, int] | str]) -> None:
    turns: Turns = DecodeTurns()
    model, tenants = Model(), Passed()
    sizes: dict[str, Passed] = defaultdict(Passed)
    numbers = itertools.count()

    def take() -> None:
        request = turns.take()
        model.take(request)
        tenants.turn(request.tenant, request.cost, {one.tenant for one in model.waiting})
        of_tenant = {one.size_range for one in model.waiting if one.tenant == request.tenant}
        sizes[request.tenant].turn(request.size_range, request.cost, of_tenant)

    for step in steps:
        if isinstance(step, tuple):
            tenant, num_pixels = step
            request = DecodeRequest(CallerId(tenant, "call"), next(numbers), num_pixels)
            put(turns, request)
            model.put(request)
            tenants.wait(tenant, request.cost)
            sizes[tenant].wait(request.size_range, request.cost)
        elif model.waiting:
            take()
    while model.waiting:
        take()
    assert not turns


@pytest.mark.parametrize("tenant", ["a", "b"])
async def test_an_encoder_decodes_a_small_picture_before_the_giants_that_wait(
    start_encoder: StartEncoder, monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    gate, begun = threading.Event(), list[int]()
    decode = DecodeWorker.decode

    def gated(self: DecodeWorker, data: bytes) -> tuple[PIL.Image.Image, ImageHeader]:
        image, header = decode(self, data)
        begun.append(header.width)
        assert gate.wait(TIMEOUT_S)
        return image, header

    monkeypatch.setattr(DecodeWorker, "decode", gated)
    async with start_encoder("llava_clip", preprocess_workers=1) as encoder:

        def sent(data: bytes, tenant: str) -> asyncio.Task[object]:
            call = encoder.stub.Encode(encode_request(source(data)), metadata=(("x-lookonce-tenant", tenant),))
            return asyncio.create_task(asyncio.wait_for(call, TIMEOUT_S))

        waiting = encoder.pipeline._encoder._budget._grants._waiting
        calls = [sent(png(seed, 1600, 1200), "a") for seed in range(5)]
        await settled(lambda: len(begun) == 1 and len(waiting) == 4)
        calls.append(sent(png(9), tenant))
        await settled(lambda: len(waiting) == 5)
        gate.set()
        await asyncio.gather(*calls)
    assert begun == [1600, 80, 1600, 1600, 1600, 1600]


def test_another_tenant_s_photo_is_decoded_before_the_rest_of_the_jpegs_of_many_scans_that_wait() -> None:
    limits = ImageLimits(max_bytes=1 << 20, max_pixels=100_000_000, max_aspect=50.0)
    # The photo has more pixels than each of the files, and takes less time to decode.
    photo = probe_image(image_files.encoded(PIL.Image.new("RGB", (4000, 3000)), "JPEG", progressive=True), limits)
    costly = probe_image(image_files.jpeg_of_many_scans(512, 512, 3800), limits)
    turns: Turns = DecodeTurns()
    put(turns, *line("a", 64, costly.num_pixels))
    assert turns.take().tenant == "a"
    put(turns, *line("b", 1, photo.num_pixels, start=100))
    assert turns.take().tenant == "b"
    assert {request.tenant for request in taken(turns)} == {"a"}
