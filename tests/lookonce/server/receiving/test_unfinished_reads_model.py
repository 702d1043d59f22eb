"""Random reads in virtual time, compared with the documented rules."""

from __future__ import annotations

import asyncio
import collections
import math
import random
from dataclasses import dataclass

import pytest

from lookonce.errors import DeadlineError, OverloadedError
from lookonce.server.receiving.unfinished_reads import ReadLimits, UnfinishedReads
from tests.lookonce.server.receiving import virtual_time

SEEDS_PER_TEST = 50
# Error of sums of times.
EPS_S = 1e-6


class OwnError(Exception):
    """An error of a read itself."""


@dataclass(slots=True, eq=False)
class Call:
    """A random call."""

    caller: str
    at_s: float
    num_turns: int
    # None: the message never comes.
    takes_s: float | None
    may_pause: bool
    error: Exception | None
    begun_s: float = math.nan
    ended_s: float = -math.inf
    is_reading: bool = False
    is_cancelled: bool = False


class Model:
    """Random calls, with checks of everything that the limits promise."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        # Times on a grid, so that several things happen at once.
        self.grid_s = rng.choice([0, 0.25, 0.5, 1.0])
        self.limits = ReadLimits(
            max_reads=rng.choice([2, 4, 8]),
            max_reads_of_caller=rng.choice([1, 2, 4]),
            sure_s=rng.choice([0.5, 1.0]),
            max_receive_s=rng.choice([3.0, 6.0]),
        )
        self.reads = UnfinishedReads(self.limits)
        callers, span_s = "abcdefgh"[: rng.randint(1, 8)], rng.choice([0, 1, 5, 20])
        self.calls = [
            Call(
                rng.choice(callers),
                self.draw_s(span_s),
                rng.randint(0, 3),
                rng.choice([0, 0.01, self.draw_s(1), self.draw_s(12), None]),
                rng.random() < 0.3,
                rng.choice([*[None] * 8, OwnError(), TimeoutError()]),
            )
            for _ in range(rng.randint(5, 60))
        ]

    def draw_s(self, most_s: float) -> float:
        drawn_s = self.rng.uniform(0, most_s)
        return round(drawn_s / self.grid_s) * self.grid_s if self.grid_s else drawn_s

    def older_than(self, age_s: float, now_s: float) -> list[Call]:
        return [call for call in self.calls if call.is_reading and now_s - call.begun_s >= age_s]

    async def call(self, call: Call) -> None:
        loop, limits = asyncio.get_running_loop(), self.limits
        await asyncio.sleep(call.at_s)
        for _ in range(call.num_turns):
            await asyncio.sleep(0)
        call.begun_s, call.is_reading = loop.time(), True

        async def read() -> Call:
            await (loop.create_future() if call.takes_s is None else asyncio.sleep(call.takes_s))
            if call.error is not None:
                raise call.error
            return call

        try:
            assert await self.reads.receive(call.caller, read, may_pause=call.may_pause) is call
        except asyncio.CancelledError:
            assert call.is_cancelled
            raise
        except OverloadedError:
            assert loop.time() - call.begun_s >= limits.sure_s - EPS_S
            now_s = loop.time()
            # Some that counted may have ended at this very time.
            old = [one for one in self.calls if one.is_reading or one.ended_s >= now_s - EPS_S]
            old = [one for one in old if now_s - one.begun_s >= limits.sure_s - EPS_S]
            own = [other for other in old if other.caller == call.caller]
            assert len(old) > limits.max_reads or len(own) > limits.max_reads_of_caller, "it harmed nobody"
            left = [other.begun_s for other in own if other.is_reading]
            assert min(left) >= call.begun_s - EPS_S, "it was not the oldest"
        except DeadlineError:
            assert not call.may_pause
            assert limits.max_receive_s - EPS_S <= loop.time() - call.begun_s
        except (OwnError, TimeoutError) as error:
            if error is not call.error:
                raise
        finally:
            call.is_reading, call.ended_s = False, loop.time()

    def check(self, now_s: float) -> None:
        """Checks the limits at a time when nothing more happens. A review may be due."""
        limits = self.limits
        assert self.reads.num_reads == sum(call.is_reading for call in self.calls)
        old = self.older_than(2 * limits.sure_s + EPS_S, now_s)
        assert len(old) <= limits.max_reads
        for num_own in collections.Counter(call.caller for call in old).values():
            assert num_own <= limits.max_reads_of_caller
        late = self.older_than(limits.max_receive_s + limits.sure_s + EPS_S, now_s)
        assert all(call.may_pause for call in late)

    async def main(self) -> None:
        tasks = {call: asyncio.create_task(self.call(call)) for call in self.calls}
        for call in self.calls:
            if self.rng.random() < 0.3:
                asyncio.get_running_loop().call_later(call.at_s + self.draw_s(5), self.cancel, call, tasks[call])
        await asyncio.wait(tasks.values(), timeout=200)
        for call, task in tasks.items():
            assert task.done() or call.may_pause
            self.cancel(call, task)
        for outcome in await asyncio.gather(*tasks.values(), return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), repr(outcome)
        assert (self.reads.num_reads, self.reads._reads) == (0, {})
        await asyncio.sleep(10)
        assert self.reads._timer is None

    @staticmethod
    def cancel(call: Call, task: asyncio.Task[None]) -> None:
        call.is_cancelled = True
        task.cancel()


@pytest.mark.parametrize("first", range(0, 400, SEEDS_PER_TEST))
def test_no_order_of_reads_breaks_a_limit(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        model = Model(seed)
        virtual_time.run(model.main(), model.check)
