"""Whether the shared cache answers, for health: a question every other second, apart from requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from lookonce.store.embedding_store import EmbeddingStore

# The name under which health tells it.
PART_NAME = "lookonce.shared_cache"
_INTERVAL_S = 2.0


class CacheHealth:
    """One per process, on its event loop. Degraded is not down: every answer is as right as before, and slower."""

    def __init__(self, store: EmbeddingStore, interval_s: float = _INTERVAL_S) -> None:
        self._store = store
        self._interval_s = interval_s
        self._asker: asyncio.Task[None] | None = None
        # Until it has been asked, nothing is known to be wrong.
        self._is_well = True

    def is_well(self) -> bool:
        """The latest answer."""
        return self._is_well

    def start(self) -> None:
        """Begins to ask; call it on the event loop."""
        self._asker = asyncio.get_running_loop().create_task(self._ask())

    async def close(self) -> None:
        """Asks no more."""
        if self._asker is not None:
            self._asker.cancel()
            await asyncio.gather(self._asker, return_exceptions=True)

    async def _ask(self) -> None:
        while True:
            self._is_well = await asyncio.to_thread(self._store.ping)
            await asyncio.sleep(self._interval_s)


@asynccontextmanager
async def watched_cache(store: EmbeddingStore | None) -> AsyncIterator[dict[str, Callable[[], bool]]]:
    """The parts for health of a process with this store, which it watches meanwhile; none without a store."""
    if store is None:
        yield {}
        return
    health = CacheHealth(store)
    health.start()
    try:
        yield {PART_NAME: health.is_well}
    finally:
        await health.close()
