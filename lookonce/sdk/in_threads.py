"""Runs the blocking work of asyncio clients in threads of the SDK's own, within a deadline.

The event loop's own threads may all be busy with the caller's work, and no deadline would count the wait for one.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from lookonce.errors import DeadlineError
from lookonce.sdk.connection.channel import Deadline
from lookonce.threads import run_in_thread

ResultT = TypeVar("ResultT")

# Reading and hashing a photo takes milliseconds; a file on a network may take longer.
_MAX_READERS = 16


@functools.cache
def readers() -> Executor:
    """Returns the threads that read and hash images."""
    return ThreadPoolExecutor(_MAX_READERS, thread_name_prefix="lookonce-images")


async def run_until(
    deadline: Deadline, threads: Executor, function: Callable[..., ResultT], *arguments: object
) -> ResultT:
    """Returns the result of `function`, or raises its error. Raises DeadlineError while it still waits or runs."""
    remaining_s = deadline.remaining_s()
    try:
        # Python 3.11's `wait_for` keeps the result and loses a cancellation that comes with it.
        async with asyncio.timeout(remaining_s):
            return await run_in_thread(threads, function, *arguments)
    except TimeoutError:
        # It may also be the function's own.
        if not deadline.has_passed():
            raise
        raise DeadlineError("the deadline passed before the images were there") from None
