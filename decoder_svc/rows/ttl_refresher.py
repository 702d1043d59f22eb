"""Extends the lifetime (TTL) of shared cache entries that this decoder reads.

Without it an image that is read often would still expire after its first lifetime. Decoders have read-only access to
the shared cache, so the encoder service extends the entries. Reads are collected and reported in a few batched calls.
If a call fails, its keys are dropped: at worst an image is encoded again.
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

# Largest number of keys in one LookupEmbeddings call.
_MAX_KEYS_PER_CALL = 256
# Most distinct images collected between two reports; further ones are not extended.
_MAX_NOTED = 16_384


class TtlRefresher:
    """Collects the keys of entries that were read, and reports them at intervals. Use it on the event loop only."""

    def __init__(self, touch: Touch, interval_s: float) -> None:
        self._touch = touch
        self._interval_s = interval_s
        # Keys are tenant-specific, so each is reported under the identity that read it.
        self._noted: dict[ContentKey, tuple[ProcessorOptions, Identity]] = {}
        self._timer: asyncio.Task[None] | None = None

    def note(self, key: ContentKey, options: ProcessorOptions) -> None:
        """Notes that rows of this image were read from the shared cache."""
        if len(self._noted) < _MAX_NOTED:
            self._noted[key] = options, current_identity()
        if self._timer is None:
            # An empty context: the report belongs to no single request, so it carries no trace and no request id.
            context = contextvars.Context()
            self._timer = asyncio.get_running_loop().create_task(self._flush_later(), context=context)

    async def close(self) -> None:
        """Stops, and drops the keys that were not reported."""
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
                    logger.info("the lifetime of %d cache entries was not extended: %s", len(keys), error.message)
                    return
