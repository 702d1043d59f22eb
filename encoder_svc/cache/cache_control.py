"""Pin, prewarm and remove embeddings in all tiers: this process, the shared cache, and by a message everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from encoder_svc.cache.cache_admin import CacheAdmin, CacheTotals, EntryStatistics
from encoder_svc.cache.cache_tiers import CacheTiers
from lookonce.content_key import ContentKey, EncoderFingerprint, Tenant
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.store.cache_names import pattern_of_fingerprint, pattern_of_tenant

ResultT = TypeVar("ResultT")

_NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Figures of one tier."""

    num_entries: int = 0
    num_bytes: int = 0
    # 0: unbounded or not known.
    capacity_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0


class CacheControl:
    """Called on the event loop; Redis is talked to in threads. Without a shared cache only this process is meant."""

    def __init__(
        self,
        tiers: CacheTiers,
        admin: CacheAdmin | None,
        fingerprint: EncoderFingerprint,
        *,
        ttl_s: int,
        restore_s: float,
    ) -> None:
        """Owns `admin`. `ttl_s`: life of an entry that is unpinned; `restore_s`: longest time of putting a copy back;
        both in seconds.
        """
        self._tiers = tiers
        self._admin = admin
        self._fingerprint = fingerprint
        self._ttl_s = ttl_s
        self._restore_s = restore_s
        # Few and of their own: an operator's scan must not keep an image's hash waiting.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="admin")

    def is_local(self, key: ContentKey) -> bool:
        """Whether this process holds the rows."""
        return self._tiers.holds(key)

    def forget(self, forgotten: Forgotten) -> None:
        """Drops rows from this process."""
        self._tiers.forget(forgotten)

    def local_statistics(self) -> TierStatistics:
        """Of this process' cache."""
        local = self._tiers.local
        num_hits, num_misses = self._tiers.num_hits_and_misses("local")
        return TierStatistics(
            len(local), local.num_bytes, local.capacity_bytes, num_hits, num_misses, local.num_evictions
        )

    async def shared_statistics(self) -> TierStatistics:
        """Entries of this encoder; bytes, capacity and evictions of the whole server; hits and misses of this process.

        Raises UnavailableError.
        """
        pattern = pattern_of_fingerprint(self._fingerprint)
        totals = await self._in_thread(lambda admin: admin.totals(pattern), CacheTotals(0, 0, 0, 0))
        num_hits, num_misses = self._tiers.num_hits_and_misses("shared")
        return TierStatistics(
            totals.num_entries, totals.used_bytes, totals.max_bytes, num_hits, num_misses, totals.num_evictions
        )

    async def describe(self, keys: Sequence[ContentKey]) -> list[EntryStatistics | None]:
        """What the shared cache knows of these images. Raises UnavailableError."""
        nothing: list[EntryStatistics | None] = [None] * len(keys)
        return await self._in_thread(lambda admin: admin.describe(keys), nothing)

    async def pin(self, keys: Sequence[ContentKey], *, unpin: bool) -> list[bool]:
        """Pins or unpins; returns which entries the shared cache has. Raises UnavailableError."""
        act = (lambda admin: admin.unpin(keys, self._ttl_s)) if unpin else (lambda admin: admin.pin(keys))
        return await self._in_thread(act, [False] * len(keys))

    async def prewarm(self, key: ContentKey) -> bool:
        """Brings the rows into this process; whether they are there now."""
        return await self._tiers.prewarm(key)

    async def evict(self, keys: Sequence[ContentKey]) -> int:
        """Removes these images everywhere; how many the shared cache had. Raises UnavailableError."""
        return await self._evict(lambda admin: admin.evict(keys), Forgotten.of(keys))

    async def evict_all(self) -> int:
        """Removes everything of this encoder everywhere."""
        pattern = pattern_of_fingerprint(self._fingerprint)
        return await self._evict(lambda admin: admin.evict_matching(pattern), EVERYTHING)

    async def evict_tenant(self, tenant: Tenant) -> int:
        """Removes everything of a tenant, of whichever encoder, everywhere."""
        return await self._evict(lambda admin: admin.evict_matching(pattern_of_tenant(tenant)), EVERYTHING)

    def close(self) -> None:
        """Ends the threads; what they are doing ends early."""
        if self._admin is not None:
            self._admin.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, act: Callable[[CacheAdmin], ResultT], without: ResultT) -> ResultT:
        """What `act` gives, or `without` where there is no shared cache."""
        admin = self._admin
        if admin is None:
            return without
        return await asyncio.get_running_loop().run_in_executor(self._threads, act, admin)

    async def _evict(self, act: Callable[[CacheAdmin], int], forgotten: Forgotten) -> int:
        """Tells before and after: whoever copied rows in between drops them, too.

        Removes once more a little later: a replica that was just putting its copy back had not heard of it yet.
        """

        def remove(admin: CacheAdmin) -> int:
            admin.tell_to_forget(forgotten)
            num_evicted = act(admin)
            admin.tell_to_forget(forgotten)
            return num_evicted

        self.forget(forgotten)
        num_evicted = await self._in_thread(remove, 0)
        self.forget(forgotten)
        if self._admin is not None:
            await asyncio.sleep(self._restore_s)
            await self._in_thread(act, 0)
        return num_evicted
