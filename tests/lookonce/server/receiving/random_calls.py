"""Random calls in virtual time, for tests that compare a receiver with its documented rules."""

from __future__ import annotations

import abc
import asyncio
import math
import random
from dataclasses import dataclass

from lookonce.errors import DeadlineError, OverloadedError
from lookonce.server.receiving.inbox import Receiver
from tests.lookonce.server.receiving import virtual_time

# Error of sums of times.
EPS_S = 1e-6


class OwnError(Exception):
    """An error of a read itself."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a caller. Its times are those of the event loop."""

    caller: str
    at_s: float
    num_turns: int
    # None: the message never comes.
    takes_s: float | None
    may_pause: bool
    error: Exception | None
    asked_s: float = math.inf
    begun_s: float = math.inf
    ended_s: float = math.inf
    is_cancelled: bool = False

    @property
    def is_waiting(self) -> bool:
        return self.asked_s < math.inf == self.begun_s == self.ended_s

    @property
    def is_reading(self) -> bool:
        return self.begun_s < math.inf == self.ended_s


class RandomCalls(abc.ABC):
    """Random calls of some callers, and checks while they run."""

    receiver: Receiver

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        # Times on a grid, so that several things happen at once.
        self.grid_s = rng.choice([0, 0.25, 0.5, 1.0])
        callers, span_s = "abcdefgh"[: rng.randint(1, 8)], rng.choice([0, 1, 5, 20])
        keen = rng.choice([*callers, None])
        self.calls = [
            Call(
                keen if keen and rng.random() < 0.5 else rng.choice(callers),
                self.draw_s(span_s),
                rng.randint(0, 3),
                rng.choice([0, 0.01, self.draw_s(1), self.draw_s(12), None]),
                rng.random() < 0.3,
                rng.choice([*[None] * 8, OwnError(), TimeoutError()]),
            )
            for _ in range(rng.randint(5, 60))
        ]

    def run(self) -> None:
        virtual_time.run(self._main(), self.check)

    @abc.abstractmethod
    def check(self, now_s: float) -> None:
        """Checks the state at a time when nothing more happens."""

    @abc.abstractmethod
    def check_read(self, call: Call, now_s: float) -> None:
        """Checks that a read may begin."""

    @abc.abstractmethod
    def check_overloaded(self, call: Call, now_s: float) -> None:
        """Checks that a call was rightly refused or ended for others."""

    @abc.abstractmethod
    def check_late(self, call: Call, now_s: float) -> None:
        """Checks that a call was rightly ended for its own time."""

    @abc.abstractmethod
    def check_end(self) -> None:
        """Checks that nothing is left of the calls."""

    def draw_s(self, most_s: float) -> float:
        drawn_s = self.rng.uniform(0, most_s)
        return round(drawn_s / self.grid_s) * self.grid_s if self.grid_s else drawn_s

    async def _call(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(call.at_s)
        for _ in range(call.num_turns):
            await asyncio.sleep(0)
        call.asked_s = loop.time()

        async def read() -> Call:
            call.begun_s = loop.time()
            self.check_read(call, call.begun_s)
            await (loop.create_future() if call.takes_s is None else asyncio.sleep(call.takes_s))
            if call.error is not None:
                raise call.error
            return call

        try:
            assert await self.receiver.receive(call.caller, read, may_pause=call.may_pause) is call
        except asyncio.CancelledError:
            assert call.is_cancelled
            raise
        except OverloadedError:
            self.check_overloaded(call, loop.time())
        except DeadlineError:
            assert not call.may_pause
            self.check_late(call, loop.time())
        except (OwnError, TimeoutError) as error:
            if error is not call.error:
                raise
        finally:
            call.ended_s = loop.time()

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = {call: asyncio.create_task(self._call(call)) for call in self.calls}
        share = self.rng.choice([0, 0.2, 0.6])
        for call, task in tasks.items():
            if self.rng.random() < share:
                loop.call_later(call.at_s + self.draw_s(self.rng.choice([0, 5, 12])), self._cancel, call, task)
        await asyncio.wait(tasks.values(), timeout=60)
        for call, task in tasks.items():
            assert task.done() or call.may_pause
            self._cancel(call, task)
        for outcome in await asyncio.gather(*tasks.values(), return_exceptions=True):
            if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
        await asyncio.sleep(10)
        self.check_end()

    @staticmethod
    def _cancel(call: Call, task: asyncio.Task[None]) -> None:
        call.is_cancelled = True
        task.cancel()
