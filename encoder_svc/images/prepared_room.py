"""How much the pixels of images may take that wait for the model. Event loop only.

Images are prepared faster than they are encoded, and pixels are large: one of 12.8 million, the most that Qwen2-VL
takes, is 308 MB of patches. What waits as a file takes as much as the file, so that is how an image waits while others
have the room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from encoder_svc.vision.forward_queue import CallerId


class Place:
    """Of one image that is being prepared, and then of its pixels."""

    def __init__(self, room: PreparedRoom) -> None:
        self._room = room
        # None while the image is being prepared.
        self.num_bytes: int | None = None

    def holds(self, num_bytes: int) -> None:
        """The image is prepared, and its pixels take so much."""
        self.num_bytes = num_bytes
        self._room.take(num_bytes)


class PreparedRoom:
    """Callers take turns, as in the queue behind it; images of one come in in their order."""

    def __init__(self, max_bytes: int, max_preparing: int) -> None:
        """Images begin while others hold less than `max_bytes`, at most `max_preparing` at a time.

        By so many images the bound may be passed, and one image always finds room.
        """
        self._max_bytes = max_bytes
        self._max_preparing = max_preparing
        self._num_bytes = 0
        self._num_preparing = 0
        # Only callers that wait, the next one first.
        self._lines: OrderedDict[CallerId, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Of all pixels in it."""
        return self._num_bytes

    @asynccontextmanager
    async def entered(self, caller: CallerId) -> AsyncIterator[Place]:
        """Waits until an image may be prepared; its pixels have their place until the block ends."""
        if self._lines or not self._has_room:
            await self._turn(caller)
        self._num_preparing += 1
        place = Place(self)
        try:
            yield place
        finally:
            if place.num_bytes is None:
                self._num_preparing -= 1
            else:
                self._num_bytes -= place.num_bytes
            self._call_next()

    def take(self, num_bytes: int) -> None:
        """An image that was being prepared has so many bytes of pixels now."""
        self._num_preparing -= 1
        self._num_bytes += num_bytes
        self._call_next()

    @property
    def _has_room(self) -> bool:
        return self._num_preparing < self._max_preparing and self._num_bytes < self._max_bytes

    async def _turn(self, caller: CallerId) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It was this one's turn: the next one's now.
                self._num_preparing -= 1
                self._call_next()
            raise
        # Was counted when it was called, so that nobody else took the room meanwhile.
        self._num_preparing -= 1

    def _call_next(self) -> None:
        while self._lines and self._has_room:
            caller, line = self._lines.popitem(last=False)
            turn = line.popleft()
            if line:
                self._lines[caller] = line
            # Who was cancelled is done.
            if not turn.done():
                self._num_preparing += 1
                turn.set_result(None)
