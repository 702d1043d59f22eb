"""Prolongs the lives of shared cache entries that this decoder reads, through the encoder: decoders only read there.

Images that are read again and again would otherwise end with their first day. Reads are only noted; once in a while all
that were noted are told in a few calls. What cannot be told is forgotten: it costs an encode at worst.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence

from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.errors import LookonceError
from lookonce.identity import Identity, acting_for, current_identity

logger = logging.getLogger(__name__)

Touch = Callable[[Sequence[ContentKey], ProcessorOptions], Awaitable[None]]

# Keys in one call, as the contract allows.
_MAX_KEYS_PER_CALL = 256
# More distinct images than this between two calls are not prolonged.
_MAX_NOTED = 16_384


class TtlRefresher:
    """Owned by the fetcher; event loop only."""

    def __init__(self, touch: Touch, interval_s: float) -> None:
        self._touch = touch
        self._interval_s = interval_s
        # For whom the encoder is asked: keys are made for their tenants.
        self._noted: dict[ContentKey, tuple[ProcessorOptions, Identity]] = {}
        self._timer: asyncio.Task[None] | None = None

    def note(self, key: ContentKey, options: ProcessorOptions) -> None:
        """Rows of this image were read from the shared cache."""
        if len(self._noted) < _MAX_NOTED:
            self._noted[key] = options, current_identity()
        if self._timer is None:
            # For no single call: neither in its trace nor under its request id.
            context = contextvars.Context()
            self._timer = asyncio.get_running_loop().create_task(self._flush_later(), context=context)

    async def close(self) -> None:
        """Forgets what has not been told."""
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)

    async def _flush_later(self) -> None:
        await asyncio.sleep(self._interval_s)
        self._timer = None
        noted, self._noted = self._noted, {}
        together: dict[tuple[ProcessorOptions, Identity], list[ContentKey]] = {}
        for key, group in noted.items():
            together.setdefault(group, []).append(key)
        for (options, identity), keys in together.items():
            for first in range(0, len(keys), _MAX_KEYS_PER_CALL):
                try:
                    with acting_for(identity):
                        await self._touch(keys[first : first + _MAX_KEYS_PER_CALL], options)
                except LookonceError as error:
                    logger.info("lives of %d cache entries were not prolonged: %s", len(keys), error.message)
                    return
