"""Callers share the slots for uploads: half for each at most, the fewest first, and silence gives way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lookonce.errors import DeadlineError, LookonceError, OverloadedError
from lookonce.server.receiving.receive_slots import ReceiveSlots, SlotLimits
from tests.lookonce.server.receiving import virtual_time

# Times in which nothing is ended.
LONG = SlotLimits(num_slots=4)
SURE_S = 0.1


def hurried(**values: Any) -> SlotLimits:
    return SlotLimits(num_slots=values.pop("num_slots", 4), sure_s=SURE_S, settle_s=SURE_S, **values)


class Uploads:
    """Calls whose messages arrive when the test says so."""

    def __init__(self, limits: SlotLimits) -> None:
        self.slots = ReceiveSlots(limits)
        self.order: list[str] = []
        self._messages: list[tuple[str, asyncio.Future[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, caller: str, *, may_pause: bool = False) -> asyncio.Task[None]:
        message: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def read() -> None:
            self.order.append(caller)
            self._messages.append((caller, message))
            await message

        self._tasks.append(asyncio.create_task(self.slots.receive(caller, read, may_pause=may_pause)))
        await turns()
        return self._tasks[-1]

    async def arrive(self, caller: str) -> None:
        """Completes the caller's oldest message."""
        entry = next(entry for entry in self._messages if entry[0] == caller and not entry[1].done())
        entry[1].set_result(None)
        await turns()

    def receiving(self) -> list[str]:
        """Callers whose messages have not arrived."""
        return [caller for caller, message in self._messages if not message.done()]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert (self.slots.num_taken, self.slots.num_waiting) == (0, 0)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def uploads(limits: SlotLimits) -> AsyncIterator[Uploads]:
    running = Uploads(limits)
    yield running
    await running.end()


async def error_of(task: asyncio.Task[None]) -> LookonceError:
    with pytest.raises(LookonceError) as caught:
        await asyncio.wait_for(task, 20)
    return caught.value


async def test_a_caller_gets_half_of_the_slots() -> None:
    async with uploads(LONG) as running:
        for caller in ("a", "a", "a", "b"):
            await running.begin(caller)
        assert running.order == ["a", "a", "b"]
        await running.arrive("b")
        assert running.slots.num_waiting == 1
        await running.arrive("a")
        assert running.order == ["a", "a", "b", "a"]


async def test_the_caller_with_the_fewest_slots_comes_first_and_equal_ones_take_turns() -> None:
    async with uploads(LONG) as running:
        for caller in ("a", "a", "b", "b", "a", "a", "b", "c", "c", "d"):
            await running.begin(caller)
        assert running.order == ["a", "a", "b", "b"]
        for caller in ("a", "a", "b", "b"):
            await running.arrive(caller)
        assert running.order[4:] == ["c", "a", "d", "b"]


@virtual_time.throughout
async def test_a_silent_upload_gives_way_to_another_caller_only_if_it_waits() -> None:
    async with uploads(hurried()) as running:
        silent = [await running.begin(caller) for caller in ("a", "b", "b", "c")]
        await asyncio.sleep(3 * SURE_S)
        assert not any(task.done() for task in silent)
        await running.begin("d")
        # The oldest one of the caller with the most slots.
        assert type(await error_of(silent[1])) is OverloadedError
        await turns()
        assert running.order[-1] == "d"
        assert sum(task.done() for task in silent) == 1


@pytest.mark.parametrize("may_pause", [False, True])
@virtual_time.throughout
async def test_overdue_slots_do_not_count_and_stay_while_there_are_free_ones(may_pause: bool) -> None:
    async with uploads(hurried()) as running:
        slow = [await running.begin("a", may_pause=may_pause) for _ in range(2)]
        await running.begin("a")
        assert running.slots.num_waiting == 1
        await asyncio.sleep(3 * SURE_S)
        await running.begin("b")
        assert (running.slots.num_taken, running.slots.num_waiting) == (4, 0)
        assert not any(task.done() for task in slow)
        await running.arrive("a")
        await slow[0]


@virtual_time.throughout
async def test_a_caller_with_its_share_ends_none_of_others() -> None:
    async with uploads(hurried()) as running:
        others = [await running.begin("b") for _ in range(2)]
        await asyncio.sleep(2 * SURE_S)
        for _ in range(3):
            await running.begin("a")
        assert running.slots.num_waiting == 1
        assert not any(task.done() for task in others)


@virtual_time.throughout
async def test_a_paused_stream_gives_way_when_all_slots_are_taken() -> None:
    async with uploads(hurried()) as running:
        paused = [await running.begin("a", may_pause=True) for _ in range(2)]
        await asyncio.sleep(2 * SURE_S)
        for caller in ("a", "a", "b"):
            await running.begin(caller)
        assert type(await error_of(paused[0])) is OverloadedError
        await turns()
        assert running.slots.num_taken == 4
        assert not paused[1].done()


@virtual_time.throughout
async def test_only_a_stream_may_take_any_time() -> None:
    async with uploads(hurried(max_receive_s=SURE_S)) as running:
        stream = await running.begin("a", may_pause=True)
        assert type(await error_of(await running.begin("b"))) is DeadlineError
        await asyncio.sleep(10 * SURE_S)
        assert not stream.done()


@virtual_time.throughout
async def test_a_call_that_waits_too_long_is_refused() -> None:
    async with uploads(SlotLimits(num_slots=2, max_wait_s=0.1)) as running:
        await running.begin("a")
        assert type(await error_of(await running.begin("a"))) is OverloadedError
        assert running.slots.num_taken == 1


@virtual_time.throughout
async def test_when_too_many_wait_the_newest_of_the_largest_caller_is_refused() -> None:
    async with uploads(hurried(num_slots=2, max_waiting=3, max_receive_s=60)) as running:
        for caller in ("a", "b"):
            await running.begin(caller, may_pause=False)
        running.slots.limits = SlotLimits(num_slots=2, settle_s=SURE_S, max_waiting=3)
        waiting = [await running.begin(caller) for caller in ("a", "a", "a", "b")]
        assert type(await error_of(waiting[2])) is OverloadedError
        assert [task.done() for task in waiting] == [False, False, True, False]


@virtual_time.throughout
async def test_only_calls_that_have_waited_for_long_count_and_are_refused() -> None:
    limits = SlotLimits(num_slots=2, settle_s=0.2, sure_s=1.0, max_waiting=3)
    async with uploads(limits) as running:
        for caller in ("a", "b"):
            await running.begin(caller)
        old = [await running.begin("a") for _ in range(3)]
        await asyncio.sleep(0.19)
        old.append(await running.begin("c"))
        fresh = []
        while not any(task.done() for task in old):
            # More than the others have, and always younger than `settle_s`.
            fresh += [await running.begin("b") for _ in range(4)]
            await asyncio.sleep(0.03)
            for task in fresh[:-16]:
                task.cancel()
        assert [task.done() for task in old] == [False, False, True, False]
        assert type(await error_of(old[2])) is OverloadedError
        assert not any(task.done() and not task.cancelled() for task in fresh)


def test_of_equal_callers_the_one_that_came_last_is_refused() -> None:
    async def main() -> None:
        async with uploads(SlotLimits(num_slots=2, max_waiting=3, crowded_sure_s=10)) as running:
            for caller in "ab":
                await running.begin(caller, may_pause=True)
            waiting = []
            for caller in "cdefg":
                waiting.append(await running.begin(caller))
                await asyncio.sleep(0.01)
            await asyncio.sleep(3)
            assert [task.done() for task in waiting] == [False, False, False, True, True]

    virtual_time.run(main())


def test_a_call_does_not_overtake_older_ones_of_its_caller() -> None:
    async def main() -> None:
        async with uploads(SlotLimits(num_slots=4)) as running:
            await running.begin("b")
            await asyncio.sleep(0.3)
            for _ in range(2):
                await running.begin("a")
            for _ in range(2):
                await running.begin("a")
            # The caller's first two are overdue, and there has been no review since.
            await asyncio.sleep(10.05)
            newest = await running.begin("a")
            assert (running.order, running.slots.num_waiting) == (["b", "a", "a", "a", "a"], 1)
            newest.cancel()
            await turns()
            assert running.slots.num_waiting == 0

    virtual_time.run(main())


def test_while_many_callers_wait_half_of_the_slots_change_hands_early_and_slow_uploads_end_in_the_others() -> None:
    async def main() -> None:
        async with uploads(LONG) as running:
            first = [await running.begin(f"first {number}") for number in range(4)]
            later = [await running.begin(f"later {number}") for number in range(5)]
            await asyncio.sleep(0.9)
            assert not any(task.done() for task in first)
            await asyncio.sleep(0.7)
            assert [task.done() for task in first] == [False, False, True, True]
            # Three wait, which are not more than there are slots.
            await asyncio.sleep(7)
            assert (sum(task.done() for task in later), running.slots.num_waiting) == (0, 3)
            await running.arrive("first 0")
            await running.arrive("first 1")
            assert first[0].result() is first[1].result() is None

    virtual_time.run(main())


def test_one_caller_alone_ends_no_uploads_of_others_early() -> None:
    async def main() -> None:
        async with uploads(LONG) as running:
            others = [await running.begin(caller) for caller in "bc"]
            for _ in range(100):
                await running.begin("a")
            await asyncio.sleep(9)
            assert not any(task.done() for task in others)

    virtual_time.run(main())


def test_a_caller_does_not_wait_long_for_many_that_were_silent() -> None:
    async def main() -> None:
        async with uploads(LONG) as running:

            async def be_silent(caller: str) -> None:
                while True:
                    with contextlib.suppress(LookonceError):
                        await running.slots.receive(caller, asyncio.get_running_loop().create_future, may_pause=False)

            silent = [asyncio.create_task(be_silent(f"silent {number}")) for number in range(40)]
            await asyncio.sleep(60)
            for number in range(10):
                asked_s = asyncio.get_running_loop().time()
                honest = await running.begin(f"honest {number}")
                while running.order[-1:] != [f"honest {number}"]:
                    await asyncio.sleep(0.1)
                assert asyncio.get_running_loop().time() - asked_s < 5
                await running.arrive(f"honest {number}")
                assert honest.done()
            for task in silent:
                task.cancel()
            await asyncio.gather(*silent, return_exceptions=True)

    virtual_time.run(main())


@pytest.mark.parametrize(("num_silent", "num_calls"), [(2, 16), (2, 32), (32, 1), (48, 1), (63, 1)])
def test_a_few_silent_callers_that_come_again_and_again_do_not_keep_another_one_waiting(
    num_silent: int, num_calls: int
) -> None:
    """Fewer of them than there are slots are no crowd: each upload beside them waited for nine seconds."""

    async def main() -> list[float]:
        slots, loop = ReceiveSlots(SlotLimits(num_slots=32)), asyncio.get_running_loop()

        async def silence() -> None:
            await loop.create_future()

        async def come_again(caller: str) -> None:
            while True:
                with contextlib.suppress(LookonceError):
                    await slots.receive(caller, silence, may_pause=False)
                await asyncio.sleep(0.01)

        silent = [
            asyncio.create_task(come_again(f"silent {number}"))
            for number in range(num_silent)
            for _ in range(num_calls)
        ]
        await asyncio.sleep(0.5)
        waits: list[float] = []
        while len(waits) < 60:
            begun_s = loop.time()
            await slots.receive("other", lambda: asyncio.sleep(0.2), may_pause=False)
            waits.append(loop.time() - begun_s - 0.2)
            await asyncio.sleep(1)
        for task in silent:
            task.cancel()
        await asyncio.gather(*silent, return_exceptions=True)
        return waits

    waits = virtual_time.run(main())
    assert max(waits[10:]) < 2.5


def test_those_who_were_silent_still_get_every_second_slot() -> None:
    async def main() -> None:
        async with uploads(LONG) as running:
            for caller in "abcd":
                running.slots._remember_slow(caller)
            for caller in ["x", "x", "y", "y", *"abcdefgh"]:
                await running.begin(caller)
            running.order.clear()
            for caller in "xxyy":
                await running.arrive(caller)
            assert "".join(running.order) in ("eafb", "aebf")

    virtual_time.run(main())


def test_a_review_of_many_callers_takes_one_pass() -> None:
    async def cost_of(num_callers: int) -> int:
        async with uploads(SlotLimits(num_slots=4, max_waiting=10)) as running:
            for number in range(num_callers):
                await running.begin(str(number))
            asyncio.get_running_loop().time = lambda: 1003.0  # type: ignore[method-assign]
            cost = virtual_time.num_function_calls(running.slots._review)
            assert running.slots.num_waiting == 10
            return cost

    small, large = (virtual_time.run(cost_of(num_callers)) for num_callers in (100, 800))
    assert large < 12 * small


async def test_a_call_that_is_cancelled_as_it_gets_its_slot_gives_it_back() -> None:
    async with uploads(SlotLimits(num_slots=2)) as running:
        first = await running.begin("a")
        second = await running.begin("a")
        first.cancel()
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert (running.slots.num_taken, running.slots.num_waiting) == (0, 0)


async def test_a_cancelled_call_gets_no_slot() -> None:
    async with uploads(SlotLimits(num_slots=2)) as running:
        for _ in range(2):
            cancelled = await running.begin("a")
        await running.begin("a")
        cancelled.cancel()
        await running.arrive("a")
        assert running.order == ["a", "a"]
        assert (running.slots.num_taken, running.slots.num_waiting) == (1, 0)


@pytest.mark.parametrize("seed", range(20))
@virtual_time.throughout
async def test_no_order_of_events_loses_a_slot(seed: int) -> None:
    rng = random.Random(seed)
    async with uploads(SlotLimits(num_slots=4, sure_s=0.01, max_receive_s=0.05, max_wait_s=0.05)) as running:
        slots, tasks = running.slots, [await running.begin("a")]
        for _ in range(100):
            event = rng.choice(["begin", "begin", "arrive", "cancel", "cancel at once", "time"])
            if event.startswith("begin"):
                tasks.append(await running.begin(rng.choice("aab"), may_pause=rng.random() < 0.3))
            elif event == "arrive":
                for caller in running.receiving()[:1]:
                    await running.arrive(caller)
            elif event.startswith("cancel"):
                rng.choice(tasks).cancel()
                await (turns() if event == "cancel" else asyncio.sleep(0))
            else:
                await asyncio.sleep(0.005)
            assert slots.num_taken <= 4
            assert slots.num_taken == sum(len(own) for own in slots._taken.values())
            assert slots.num_waiting == sum(len(own) for own in slots._waiting.values())
