"""Listeners on the forget channel that note what they receive, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from lookonce.forgotten import Forgotten
from lookonce.store.forget_channel import ForgetListener

TIMEOUT_S = 20.0


@contextlib.asynccontextmanager
async def listening(url: str, check_s: float = 60.0) -> AsyncIterator[tuple[ForgetListener, asyncio.Queue[Forgotten]]]:
    """Yields a started listener and the queue of all that it was told to forget. Fails after TIMEOUT_S."""
    heard: asyncio.Queue[Forgotten] = asyncio.Queue()
    listener = ForgetListener(url, 1.0, heard.put_nowait, check_s=check_s)
    listener.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield listener, heard
    finally:
        await listener.close()


async def reconnected(listener: ForgetListener) -> None:
    """Waits until a lost subscription has ended and another one has begun."""
    while listener.is_listening:
        await asyncio.sleep(0.01)
    await listener.wait_until_listening()
