"""Random uploads in virtual time, compared with the documented rules."""

from __future__ import annotations

import collections

import pytest

from lookonce.server.receiving.receive_slots import ReceiveSlots, SlotLimits
from tests.lookonce.server.receiving.random_calls import EPS_S, Call, RandomCalls

SEEDS_PER_TEST = 50


class RandomUploads(RandomCalls):
    """Random calls that need slots."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.limits = SlotLimits(
            num_slots=rng.choice([2, 2, 3, 4, 5, 8]),
            sure_s=rng.choice([1.0, 2.0]),
            crowded_sure_s=rng.choice([0.25, 1.0]),
            max_receive_s=rng.choice([4.0, 8.0]),
            max_wait_s=rng.choice([3.0, 6.0]),
            max_waiting=rng.choice([0, 1, 3, 8, 128]),
            settle_s=rng.choice([0.5, 1.0]),
        )
        self.receiver = self.slots = ReceiveSlots(self.limits)
        # Two reviews, one of which may just be due.
        self.slack_s = self.limits.sure_s / 10 + EPS_S
        # The time since which overdue slots are kept from calls that may have them.
        self.kept_since_s: float | None = None

    def num_own(self, caller: str, since_s: float) -> int:
        """The number of the caller's reads that began after a time."""
        return sum(call.is_reading and call.caller == caller and call.begun_s > since_s for call in self.calls)

    def settled(self, now_s: float) -> list[Call]:
        return [call for call in self.calls if call.is_waiting and now_s - call.asked_s >= self.limits.settle_s - EPS_S]

    def check_read(self, call: Call, now_s: float) -> None:
        limits = self.limits
        assert sum(one.is_reading for one in self.calls) <= limits.num_slots
        assert self.num_own(call.caller, now_s - limits.sure_s + EPS_S) <= limits.num_slots // 2
        assert now_s - call.asked_s <= limits.max_wait_s + EPS_S

    def check_overloaded(self, call: Call, now_s: float) -> None:
        limits, waited_s = self.limits, now_s - call.asked_s
        if call.begun_s < now_s + EPS_S:
            # Whether too many callers waited then can no longer be seen.
            assert now_s - call.begun_s >= min(limits.sure_s, limits.crowded_sure_s) - EPS_S
        elif waited_s < limits.max_wait_s - EPS_S:
            settled = self.settled(now_s)
            assert len(settled) >= limits.max_waiting
            assert waited_s >= limits.settle_s - EPS_S, "it did not count"
            numbers = collections.Counter(one.caller for one in settled)
            # The call itself is among them.
            assert numbers[call.caller] >= max(numbers.values()) - 1

    def check_late(self, call: Call, now_s: float) -> None:
        assert now_s - call.begun_s >= self.limits.max_receive_s - EPS_S

    def check(self, now_s: float) -> None:
        limits = self.limits
        reading = [call for call in self.calls if call.is_reading]
        waiting = [call for call in self.calls if call.is_waiting]
        assert (self.slots.num_taken, self.slots.num_waiting) == (len(reading), len(waiting))
        for call in waiting:
            own = [one.asked_s for one in reading if one.caller == call.caller]
            assert max(own, default=0) <= call.asked_s, "it was overtaken"
        entitled = [
            call
            for call in waiting
            if self.num_own(call.caller, now_s - limits.sure_s - self.slack_s) < limits.num_slots // 2
        ]
        assert not entitled or len(reading) == limits.num_slots, "a slot is free"
        sure_s = limits.sure_s
        if len({call.caller for call in waiting}) > limits.num_slots:
            sure_s = min(sure_s, limits.crowded_sure_s)
            reading = sorted(reading, key=lambda call: call.begun_s)[limits.num_slots // 2 :]
        overdue = [call for call in reading if now_s - call.begun_s > sure_s + self.slack_s]
        if not overdue or not entitled:
            self.kept_since_s = None
        elif self.kept_since_s is None:
            self.kept_since_s = now_s
        else:
            assert now_s - self.kept_since_s <= self.slack_s
        assert len(self.settled(now_s - self.slack_s)) <= limits.max_waiting
        for call in reading:
            assert call.may_pause or now_s - call.begun_s <= limits.max_receive_s + self.slack_s

    def check_end(self) -> None:
        slots = self.slots
        assert (slots.num_taken, slots.num_waiting, slots._taken, slots._waiting) == (0, 0, {}, {})
        assert slots._timer is None


@pytest.mark.parametrize("first", range(0, 400, SEEDS_PER_TEST))
def test_no_order_of_uploads_breaks_a_limit(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        RandomUploads(seed).run()
