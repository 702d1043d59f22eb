"""Reasons to end calls from outside: the gateway ends, or no decoder has served for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from lookonce.errors import LookonceError, UnavailableError

# Time between two looks at the decoders, and the longest wait for the answer, seconds.
_LOOK_S = 1.0
# Time that a new call waits for a decoder, for example while the only one restarts, seconds.
_WAIT_S = 10.0
# Time after which calls in progress end if no decoder has served, seconds. A decoder that drains says so, and finishes
# its calls within half a minute by default.
_LOST_S = 60.0
_RETRY_AFTER_S = 5.0


class Interruptions:
    """Knows whether calls must end. Use it from one event loop."""

    def __init__(self, wait_until_ready: Callable[[float], Awaitable[None]]) -> None:
        """`wait_until_ready` takes a time in seconds and raises LookonceError if no decoder serves within it."""
        self._wait_until_ready = wait_until_ready
        self._served_s = time.monotonic()
        self._ended: asyncio.Future[LookonceError] = asyncio.get_running_loop().create_future()
        self._lost: asyncio.Future[LookonceError] = asyncio.get_running_loop().create_future()
        self._looking = asyncio.create_task(self._look())

    def end(self) -> None:
        """Ends all calls: the gateway ends."""
        if not self._ended.done():
            self._ended.set_result(UnavailableError("the gateway ends; try another one", retry_after_s=1.0))

    async def check_served(self) -> None:
        """Returns when a decoder serves. Raises UnavailableError if none does for ten seconds."""
        if time.monotonic() - self._served_s > 2 * _LOOK_S:
            try:
                await self._wait_until_ready(_WAIT_S)
            except LookonceError:
                raise _no_decoder() from None

    async def next(self) -> LookonceError:
        """Waits for a reason to end calls and returns it as an error."""
        done, _ = await asyncio.wait({self._ended, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()

    async def aclose(self) -> None:
        """Ends the looks at the decoders."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            try:
                await self._wait_until_ready(_LOOK_S)
                self._served_s = time.monotonic()
            except LookonceError:
                if time.monotonic() - self._served_s > _LOST_S:
                    # Calls that come later wait anew.
                    lost, self._lost = self._lost, asyncio.get_running_loop().create_future()
                    lost.set_result(_no_decoder())
                    self._served_s = time.monotonic() - 2 * _LOOK_S
            await asyncio.sleep(_LOOK_S)


def _no_decoder() -> UnavailableError:
    return UnavailableError("no decoder serves at the moment; try again later", retry_after_s=_RETRY_AFTER_S)
