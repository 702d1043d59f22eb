"""Health of the shared cache: a ping every two seconds, independent of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from lookonce.store.embedding_store import EmbeddingStore

# Service name of this part in the gRPC health protocol.
PART_NAME = "lookonce.shared_cache"
_INTERVAL_S = 2.0


class CacheHealth:
    """Pings the shared cache from the event loop and keeps the latest result; one per process.

    Without the cache a service is degraded, not down: its answers stay correct and come later.
    """

    def __init__(self, store: EmbeddingStore, interval_s: float = _INTERVAL_S) -> None:
        self._store = store
        self._interval_s = interval_s
        self._pinger: asyncio.Task[None] | None = None
        # Healthy until the first ping has failed.
        self._is_healthy = True

    def is_healthy(self) -> bool:
        """Returns whether the latest ping succeeded."""
        return self._is_healthy

    def start(self) -> None:
        """Starts to ping; call this on the event loop."""
        self._pinger = asyncio.get_running_loop().create_task(self._ping_forever())

    async def close(self) -> None:
        """Stops pinging and waits for the task to end."""
        if self._pinger is not None:
            self._pinger.cancel()
            await asyncio.gather(self._pinger, return_exceptions=True)

    async def _ping_forever(self) -> None:
        while True:
            self._is_healthy = await asyncio.to_thread(self._store.ping)
            await asyncio.sleep(self._interval_s)


@asynccontextmanager
async def watched_cache(store: EmbeddingStore | None) -> AsyncIterator[dict[str, Callable[[], bool]]]:
    """Yields the parts that a health service reports, and pings the store meanwhile; no parts without a store."""
    if store is None:
        yield {}
        return
    health = CacheHealth(store)
    health.start()
    try:
        yield {PART_NAME: health.is_healthy}
    finally:
        await health.close()
