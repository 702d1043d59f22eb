"""Random reads in virtual time, compared with the documented rules."""

from __future__ import annotations

import collections

import pytest

from lookonce.server.receiving.unfinished_reads import ReadLimits, UnfinishedReads
from tests.lookonce.server.receiving.random_calls import EPS_S, Call, RandomCalls

SEEDS_PER_TEST = 50


class RandomReads(RandomCalls):
    """Random calls whose reads begin at once."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.limits = ReadLimits(
            max_reads=self.rng.choice([2, 4, 8]),
            max_reads_of_caller=self.rng.choice([1, 2, 4]),
            sure_s=self.rng.choice([0.5, 1.0]),
            max_receive_s=self.rng.choice([3.0, 6.0]),
        )
        self.receiver = self.reads = UnfinishedReads(self.limits)

    def check_read(self, call: Call, now_s: float) -> None:
        assert call.begun_s == call.asked_s

    def check_overloaded(self, call: Call, now_s: float) -> None:
        limits = self.limits
        assert now_s - call.begun_s >= limits.sure_s - EPS_S
        # Some that counted may have ended at this very time.
        counted = [one for one in self.calls if one.begun_s <= now_s - limits.sure_s + EPS_S and one.ended_s >= now_s]
        own = [one for one in counted if one.caller == call.caller]
        assert len(counted) > limits.max_reads or len(own) > limits.max_reads_of_caller, "it harmed nobody"
        assert min(one.begun_s for one in own if one.is_reading) >= call.begun_s - EPS_S, "it was not the oldest"

    def check_late(self, call: Call, now_s: float) -> None:
        assert now_s - call.begun_s >= self.limits.max_receive_s - EPS_S

    def check(self, now_s: float) -> None:
        limits, reading = self.limits, [call for call in self.calls if call.is_reading]
        assert self.reads.num_reads == len(reading)
        # The next review comes up to `sure_s` later.
        counted = [call for call in reading if now_s - call.begun_s > 2 * limits.sure_s + EPS_S]
        assert len(counted) <= limits.max_reads
        for num_own in collections.Counter(call.caller for call in counted).values():
            assert num_own <= limits.max_reads_of_caller
        for call in counted:
            assert call.may_pause or now_s - call.begun_s <= limits.max_receive_s + limits.sure_s + EPS_S

    def check_end(self) -> None:
        assert (self.reads.num_reads, self.reads._reads, self.reads._timer) == (0, {}, None)


@pytest.mark.parametrize("first", range(0, 400, SEEDS_PER_TEST))
def test_no_order_of_reads_breaks_a_limit(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        RandomReads(seed).run()
