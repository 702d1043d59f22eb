from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lookonce.threads import run_in_thread

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("REQUEST", default="none")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="hop") as executor:
        yield executor


async def test_the_call_runs_in_the_thread_with_its_arguments(threads: ThreadPoolExecutor) -> None:
    def where(number: int, *, word: str) -> tuple[str, int, str]:
        return threading.current_thread().name, number, word

    name, number, word = await run_in_thread(threads, where, 3, word="three")
    assert name.startswith("hop")
    assert (number, word) == (3, "three")


async def test_each_task_s_context_follows_it_into_the_shared_thread(threads: ThreadPoolExecutor) -> None:
    async def call(request: str) -> str:
        REQUEST.set(request)
        return await run_in_thread(threads, REQUEST.get)

    assert await asyncio.gather(*(call(name) for name in ("a", "b", "c"))) == ["a", "b", "c"]
    assert await run_in_thread(threads, REQUEST.get) == "none"


async def test_variables_set_by_the_call_stay_in_its_own_context(threads: ThreadPoolExecutor) -> None:
    await run_in_thread(threads, REQUEST.set, "thread")
    assert REQUEST.get() == "none"
    assert await run_in_thread(threads, REQUEST.get) == "none"


async def test_an_error_arrives_at_the_caller(threads: ThreadPoolExecutor) -> None:
    def fail() -> None:
        raise ValueError("from the thread")

    with pytest.raises(ValueError, match="from the thread"):
        await run_in_thread(threads, fail)


async def test_a_cancelled_caller_does_not_interrupt_the_call(threads: ThreadPoolExecutor) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait(30)
        ended.set()

    task = asyncio.create_task(run_in_thread(threads, work))
    await asyncio.to_thread(began.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert await asyncio.to_thread(ended.wait, 30)
