"""Passes keep their bounds, callers take turns, and no image waits for more passes than promised."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.vision.forward_queue import ForwardJob, ForwardQueue
from lookonce.turns.fair_queue import CallerId

PIXEL_BYTES = 4
TENANTS = ["x", "y", "z"]
# Tenants have calls with equal request ids.
CALLERS = [CallerId(tenant, name) for tenant in TENANTS for name in "abc"]


def stacked(num_pixels: int = 1) -> PixelInputs:
    """An image of a family that stacks equal shapes."""
    return PixelInputs({"pixel_values": torch.zeros(1, num_pixels)}, 1)


def packed(num_patches: int) -> PixelInputs:
    """An image of a family that puts the patches of all images into one sequence."""
    return PixelInputs({"pixel_values": torch.zeros(num_patches, 1, 1)}, num_patches)


def filled(images: str, *, max_images: int = 4, max_bytes: int = 1 << 20) -> ForwardQueue:
    """A queue of one-pixel images; each letter is an image's caller, in the order of arrival."""
    queue = ForwardQueue(max_images, max_bytes)
    for number, name in enumerate(images):
        queue.put(ForwardJob(stacked(), CallerId("x", name), number, 0.0))
    return queue


def passes(queue: ForwardQueue) -> list[str]:
    """Takes all passes. Returns the callers of each pass in order."""
    taken = []
    while plan := queue.plan():
        queue.take(plan)
        taken.append("".join(job.caller.request_id for job in plan))
    return taken


@pytest.mark.parametrize(
    ("images", "max_images", "expected"),
    [
        ("", 4, []),
        ("aaaaaa", 4, ["aaaa", "aa"]),
        ("aaaaaabc", 4, ["abca", "aaaa"]),
        ("aaaabbbb", 4, ["abab", "abab"]),
        ("abcdefgh", 4, ["abcd", "efgh"]),
        # One place goes to the oldest image, the other to each caller in turn: c and d do not wait for a and b to end.
        ("aaaabbbbccccdddd", 2, ["ab", "ac", "ad", "ab", "bc", "bd", "cd", "cd"]),
        ("aaaab", 1, ["a", "b", "a", "a", "a"]),
        ("aaabbc", 1, ["a", "b", "a", "c", "a", "b"]),
    ],
)
def test_callers_take_turns(images: str, max_images: int, expected: list[str]) -> None:
    assert passes(filled(images, max_images=max_images)) == expected


def test_an_image_that_was_ready_late_goes_before_those_asked_for_after_it() -> None:
    queue = ForwardQueue(1, 1 << 20)
    for number, name in [(3, "a"), (2, "b"), (1, "a"), (0, "a")]:
        queue.put(ForwardJob(stacked(), CallerId("x", name), number, 0.0))
    taken = []
    while plan := queue.plan():
        queue.take(plan)
        taken += [job.number for job in plan]
    assert taken == [0, 2, 1, 3], "in order, and by turns"


def test_a_late_caller_waits_for_one_pass_of_a_large_call() -> None:
    queue = filled("a" * 64, max_images=8)
    queue.take(queue.plan())
    queue.put(ForwardJob(stacked(), CallerId("x", "b"), 64, 0.0))
    assert "b" in [job.caller.request_id for job in queue.plan()]


@pytest.mark.parametrize(
    ("images", "max_images", "expected"),
    [
        # Each image is written as its tenant and the call.
        ("x1 x2 x3 x4 x5 x6 y1", 4, ["x1 y1 x2 x3", "x4 x5 x6"]),
        ("x1 x1 x2 x2 y1 y1", 2, ["x1 y1", "x2 y1", "x1 x2"]),
        ("x1 x1 x1 x2 y1 y1 y1", 2, ["x1 y1", "x2 y1", "x1 y1", "x1"]),
        ("x1 x2 x3 x4 y1 y1", 1, ["x1", "y1", "x2", "y1", "x3", "x4"]),
        ("x1 x2 x3 y1 z1 z2", 3, ["x1 y1 z1", "x2 z2 x3"]),
        # A request id that another tenant has, too, is another call.
        ("x1 x1 x1 x1 y1", 2, ["x1 y1", "x1 x1", "x1"]),
    ],
)
def test_tenants_take_turns_before_their_calls_do(images: str, max_images: int, expected: list[str]) -> None:
    queue = ForwardQueue(max_images, 1 << 20)
    for number, image in enumerate(images.split()):
        queue.put(ForwardJob(stacked(), CallerId(image[0], image[1]), number, 0.0))
    taken = []
    while plan := queue.plan():
        queue.take(plan)
        taken.append(" ".join("".join(job.caller) for job in plan))
    assert taken == expected


def test_a_tenant_with_many_calls_does_not_delay_another_one_s_call() -> None:
    queue = ForwardQueue(4, 1 << 20)
    for number in range(100):
        queue.put(ForwardJob(stacked(), CallerId("x", str(number)), number, 0.0))
    for number in range(100, 106):
        queue.put(ForwardJob(stacked(), CallerId("y", "0"), number, 0.0))
    num_passes = 0
    while any(job.caller.tenant == "y" for job in queue.plan()):
        queue.take(queue.plan())
        num_passes += 1
    assert num_passes == 3


def test_a_large_call_gets_one_place_while_many_small_ones_come() -> None:
    queue = filled("a" * 10, max_images=4)
    numbers = itertools.count(10)
    for _ in range(10):
        for _ in range(4):
            number = next(numbers)
            queue.put(ForwardJob(stacked(), CallerId("x", str(number)), number, 0.0))
        plan = queue.plan()
        assert plan[0].caller.request_id == "a"
        queue.take(plan)
    assert "a" not in {job.caller.request_id for job in queue.clear()}


def test_stacked_images_of_one_shape_share_a_pass_and_packed_ones_of_any() -> None:
    for images, expected in (
        ([stacked(1), stacked(2), stacked(1), stacked(2)], [[1, 1], [2, 2]]),
        ([packed(1), packed(2), packed(3)], [[1, 2, 3]]),
    ):
        queue = ForwardQueue(8, 1 << 20)
        for number, inputs in enumerate(images):
            queue.put(ForwardJob(inputs, CallerId("x", str(number)), number, 0.0))
        sizes = []
        while plan := queue.plan():
            queue.take(plan)
            sizes.append([job.inputs.pixel_values.numel() for job in plan])
        assert sizes == expected


def test_a_small_image_passes_a_large_one_of_somebody_else_but_never_of_its_own_caller() -> None:
    queue = ForwardQueue(8, 10 * PIXEL_BYTES)
    for number, (name, num_patches) in enumerate([("a", 4), ("b", 9), ("b", 1), ("c", 2)]):
        queue.put(ForwardJob(packed(num_patches), CallerId("x", name), number, 0.0))
    first = queue.plan()
    assert [job.number for job in first] == [0, 3]
    queue.take(first)
    assert [job.number for job in queue.plan()] == [1, 2]


class AnyTraffic(RuleBasedStateMachine):
    """Arrivals and passes in any order, checked against a plain list of what waits."""

    @initialize(max_images=st.integers(1, 5), max_pixels=st.integers(1, 12))
    def open(self, max_images: int, max_pixels: int) -> None:
        self.max_images, self.max_bytes = max_images, max_pixels * PIXEL_BYTES
        self.queue = ForwardQueue(self.max_images, self.max_bytes)
        self.waiting: list[ForwardJob] = []
        self.numbers = itertools.count()
        # By image: the passes since it came, and the most passes that it may wait.
        self.waited: dict[int, int] = {}
        self.allowed: dict[int, int] = {}
        self.last_tenants: set[str] = set()
        # By tenant that waits or had a place in the last pass: the callers of its places in its last pass.
        self.last_callers: dict[str, set[CallerId]] = {}

    @rule(caller=st.sampled_from(CALLERS), size=st.integers(1, 6), is_packed=st.booleans(), count=st.integers(1, 6))
    def arrive(self, caller: CallerId, size: int, is_packed: bool, count: int) -> None:
        for _ in range(count):
            job = ForwardJob(packed(size) if is_packed else stacked(size), caller, next(self.numbers), 0.0)
            self.waited[job.number] = 0
            self.allowed[job.number] = 4 * (len(self.waiting) + 1)
            self.waiting.append(job)
            self.queue.put(job)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.waiting))
        for _ in range(2):
            self.queue.discard(job.caller, job.number)
        self.waiting.remove(job)

    @precondition(lambda self: self.waiting)
    @rule()
    def run_a_pass(self) -> None:
        plan = self.queue.plan()
        assert plan == self.queue.plan(), "a question changes nothing"
        self.check_bounds(plan)
        self.check_order(plan)
        self.check_turns(plan)
        self.queue.take(plan)
        for job in self.waiting:
            self.waited[job.number] += 1
            assert self.waited[job.number] <= self.allowed[job.number], "an image starves"
        self.waiting = [job for job in self.waiting if job not in plan]
        self.last_tenants = {job.caller.tenant for job in plan}
        for tenant in self.last_tenants:
            self.last_callers[tenant] = {job.caller for job in plan if job.caller.tenant == tenant}
        kept = self.last_tenants | {job.caller.tenant for job in self.waiting}
        self.last_callers = {tenant: callers for tenant, callers in self.last_callers.items() if tenant in kept}

    def check_bounds(self, plan: list[ForwardJob]) -> None:
        assert 1 <= len(plan) <= self.max_images
        assert len(plan) == 1 or sum(job.inputs.size_bytes for job in plan) <= self.max_bytes
        assert len({job.inputs.pixel_values.shape[1:] for job in plan}) == 1

    def check_order(self, plan: list[ForwardJob]) -> None:
        oldest = self.waiting[0].caller.tenant
        had_it_all = self.last_tenants == {oldest} and len({job.caller.tenant for job in self.waiting}) > 1
        assert (plan[0].caller.tenant != oldest) == had_it_all
        for tenant in {job.caller.tenant for job in plan}:
            first = next(job for job in plan if job.caller.tenant == tenant)
            line = [job for job in self.waiting if job.caller.tenant == tenant]
            if self.last_callers.get(tenant) == {line[0].caller} and len({job.caller for job in line}) > 1:
                assert first.caller != line[0].caller or first is not plan[0]
            else:
                assert first is line[0] or first is not plan[0]
        for caller in CALLERS:
            line = [job for job in self.waiting if job.caller == caller]
            mine = [job for job in plan if job.caller == caller]
            assert mine == line[: len(mine)]

    def check_turns(self, plan: list[ForwardJob]) -> None:
        """Asserts that whoever has a waiting image that would fit got at most one place less than any other.

        Tenants are compared with tenants, and callers with those of their tenant.
        """
        tenants = Counter(job.caller.tenant for job in plan)
        places = Counter(job.caller for job in plan)
        num_bytes = sum(job.inputs.size_bytes for job in plan)
        for job in self.waiting:
            inputs, first = job.inputs, plan[0].inputs
            fits = num_bytes + inputs.size_bytes <= self.max_bytes
            fits = fits and inputs.pixel_values.shape[1:] == first.pixel_values.shape[1:]
            is_next = job not in plan and not any(
                other.caller == job.caller and other.number < job.number and other not in plan for other in self.waiting
            )
            if is_next and fits:
                assert len(plan) == self.max_images, "a free place stays empty"
                assert tenants[job.caller.tenant] >= max(tenants.values()) - 1
                of_tenant = [places[caller] for caller in CALLERS if caller.tenant == job.caller.tenant]
                assert places[job.caller] >= max(of_tenant) - 1

    @invariant()
    def the_length_is_what_waits(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.waiting)


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=60, stateful_step_count=40)
