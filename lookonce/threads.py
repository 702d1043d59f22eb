"""Runs a blocking call in a thread, in the context of the task that asks for it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


async def run_in_thread(
    threads: Executor,
    function: Callable[ArgumentsT, ResultT],
    *arguments: ArgumentsT.args,
    **keywords: ArgumentsT.kwargs,
) -> ResultT:
    """Calls `function` in one of `threads`; returns its result or raises its exception.

    The thread sees the caller's context variables, so log lines and spans keep the request they belong to. Cancelling
    the caller does not interrupt a call that has begun. `asyncio.to_thread` does the same in the loop's own threads.
    """
    return await begin_in_thread(threads, function, *arguments, **keywords)


def begin_in_thread(
    threads: Executor,
    function: Callable[ArgumentsT, ResultT],
    *arguments: ArgumentsT.args,
    **keywords: ArgumentsT.kwargs,
) -> asyncio.Future[ResultT]:
    """Hands the call to one of `threads`, as `run_in_thread` does, and returns the future of its result."""
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return loop.run_in_executor(threads, lambda: context.run(function, *arguments, **keywords))
