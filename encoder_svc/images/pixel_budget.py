"""Admission of images to decoding: in turns, and within the memory budget of their pixels. Event loop only.

Images are preprocessed faster than they are encoded, and pixels are large: one image of 12.8 million pixels, the most
that Qwen2-VL takes, is 308 MB of patches. While the budget is used up or all decoding processes are busy, images wait
as compressed files, and `lookonce/turns/cost_turns.py` says which is next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lookonce.turns.cost_turns import TurnRequest
from lookonce.turns.grants import Grants


class Reservation:
    """One image's share of the budget, held from the start of its decoding to the end of its forward pass."""

    def __init__(self, budget: PixelBudget) -> None:
        self._budget = budget
        # Bytes of its pixels; None while the image is being preprocessed.
        self.num_bytes: int | None = None

    def charge(self, num_bytes: int) -> None:
        """Ends the image's preprocessing and charges the size of its pixels to the budget. Call it once."""
        self.num_bytes = num_bytes
        self._budget.charge(num_bytes)


class PixelBudget:
    """Grants reservations in turn. An image that is being decoded is not interrupted."""

    def __init__(self, max_bytes: int, max_preparing: int) -> None:
        """Grants a reservation while less than `max_bytes` are charged and fewer than `max_preparing` images are being
        preprocessed.

        The size of an image's pixels is known only after its preprocessing, so up to `max_preparing` images may exceed
        the budget. An image larger than the whole budget is still accepted.
        """
        self._max_bytes = max_bytes
        self._max_preparing = max_preparing
        self._num_bytes = 0
        self._num_preparing = 0
        self._grants = Grants(self._has_room, self._count)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pixels that are charged now."""
        return self._num_bytes

    @asynccontextmanager
    async def reserved(self, request: TurnRequest) -> AsyncIterator[Reservation]:
        """Waits for a reservation and holds it until the block ends."""
        await self._grants.wait(request)
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            if reservation.num_bytes is None:
                self._num_preparing -= 1
            else:
                self._num_bytes -= reservation.num_bytes
            self._grants.give()

    def charge(self, num_bytes: int) -> None:
        """Turns one image from being preprocessed into `num_bytes` of pixels."""
        self._num_preparing -= 1
        self._num_bytes += num_bytes
        self._grants.give()

    def _has_room(self) -> bool:
        return self._num_preparing < self._max_preparing and self._num_bytes < self._max_bytes

    def _count(self, change: int) -> None:
        self._num_preparing += change
