"""A cancelled task stays cancelled, even if what it waits for is done at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from lookonce.errors import DeadlineError
from lookonce.sdk.connection.channel import Deadline
from lookonce.sdk.in_threads import run_until


class OneThread(Executor):
    """Holds what it is given until `finish`."""

    def __init__(self) -> None:
        self._waiting: Future[Any] = Future()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert self._waiting.set_running_or_notify_cancel()
        return self._waiting

    def finish(self) -> None:
        self._waiting.set_result("done")


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_cancellation_that_comes_with_the_result_is_kept(num_turns: int) -> None:
    threads = OneThread()
    task = asyncio.create_task(run_until(Deadline.after(60), threads, str))
    for _ in range(3):
        await asyncio.sleep(0)
    threads.finish()
    # The result reaches the task a few turns of the event loop later; one of these turns is the same.
    for _ in range(num_turns):
        await asyncio.sleep(0)
    was_cancelled = task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == was_cancelled


async def test_work_that_takes_too_long_is_a_deadline_error() -> None:
    with pytest.raises(DeadlineError, match="before the images were there"):
        await run_until(Deadline.after(0.2), OneThread(), str)
