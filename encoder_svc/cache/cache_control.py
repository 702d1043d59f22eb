"""Pins, prewarms and removes embeddings: in this process, in the shared cache, and by a message in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from encoder_svc.cache.cache_admin import CacheAdmin, CacheTotals, EntryStatistics
from encoder_svc.cache.cache_tiers import CacheTiers
from lookonce.content_key import ContentKey, EncoderFingerprint, Tenant
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.store.cache_names import pattern_of_fingerprint, pattern_of_tenant
from lookonce.threads import run_in_thread

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")

_NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """The state of one tier of the cache."""

    num_entries: int = 0
    num_bytes: int = 0
    # 0 when it is unbounded or not known.
    capacity_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0


class CacheControl:
    """Operators' actions on the caches. Without a shared cache they concern this process only.

    Called on the event loop; Redis is talked to in threads.
    """

    def __init__(
        self,
        tiers: CacheTiers,
        admin: CacheAdmin | None,
        fingerprint: EncoderFingerprint,
        *,
        ttl_s: int,
        restore_s: float,
    ) -> None:
        """Owns `admin`; None: there is no shared cache.

        `ttl_s`: time to live of an entry that is unpinned, seconds. `restore_s`: the longest time that a replica takes
        to write a local copy back, seconds.
        """
        self._tiers = tiers
        self._admin = admin
        self._fingerprint = fingerprint
        self._ttl_s = ttl_s
        self._restore_s = restore_s
        # Separate threads, so that an operator's long scan does not delay requests.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="admin")

    def is_local(self, key: ContentKey) -> bool:
        """Whether this process holds the rows."""
        return self._tiers.holds(key)

    def local_statistics(self) -> TierStatistics:
        """The state of this process's cache."""
        local = self._tiers.local
        num_hits, num_misses = self._tiers.num_hits_and_misses("local")
        return TierStatistics(
            len(local), local.num_bytes, local.capacity_bytes, num_hits, num_misses, local.num_evictions
        )

    async def shared_statistics(self) -> TierStatistics:
        """The state of the shared cache.

        Entries are those of this encoder; bytes, capacity and evictions belong to the whole server; hits and misses are
        those of this process. Raises UnavailableError.
        """
        pattern = pattern_of_fingerprint(self._fingerprint)
        totals = await self._with_admin(CacheAdmin.totals, CacheTotals(0, 0, 0, 0), pattern)
        num_hits, num_misses = self._tiers.num_hits_and_misses("shared")
        return TierStatistics(
            totals.num_entries, totals.used_bytes, totals.max_bytes, num_hits, num_misses, totals.num_evictions
        )

    async def describe(self, keys: Sequence[ContentKey]) -> list[EntryStatistics | None]:
        """The shared cache's entry of each image, None where it has none. Raises UnavailableError."""
        nothing: list[EntryStatistics | None] = [None] * len(keys)
        return await self._with_admin(CacheAdmin.describe, nothing, keys)

    async def pin(self, keys: Sequence[ContentKey], *, unpin: bool) -> list[bool]:
        """Pins or unpins images. Returns for each whether the shared cache has it. Raises UnavailableError."""
        nothing = [False] * len(keys)
        if unpin:
            return await self._with_admin(CacheAdmin.unpin, nothing, keys, self._ttl_s)
        return await self._with_admin(CacheAdmin.pin, nothing, keys)

    async def prewarm(self, key: ContentKey) -> bool:
        """Brings rows from the shared cache into this process. Returns whether they are here now."""
        return await self._tiers.prewarm(key)

    async def evict(self, keys: Sequence[ContentKey]) -> int:
        """Removes images everywhere. Returns how many of them the shared cache had. Raises UnavailableError."""
        return await self._evict(lambda admin: admin.evict(keys), Forgotten.of(keys))

    async def evict_all(self) -> int:
        """Removes all images of this encoder everywhere. Returns and raises as `evict`."""
        pattern = pattern_of_fingerprint(self._fingerprint)
        return await self._evict(lambda admin: admin.evict_matching(pattern), EVERYTHING)

    async def evict_tenant(self, tenant: Tenant) -> int:
        """Removes all images of a tenant everywhere, those of other encoders too. Returns and raises as `evict`."""
        return await self._evict(lambda admin: admin.evict_matching(pattern_of_tenant(tenant)), EVERYTHING)

    def close(self) -> None:
        """Ends the threads without waiting for operations in progress."""
        if self._admin is not None:
            self._admin.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _with_admin(
        self,
        function: Callable[Concatenate[CacheAdmin, ArgumentsT], ResultT],
        without: ResultT,
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """The result of `function(admin, *arguments)` in a thread, or `without` where there is no shared cache."""
        if self._admin is None:
            return without
        return await run_in_thread(self._threads, function, self._admin, *arguments, **keywords)

    async def _evict(self, remove: Callable[[CacheAdmin], int], forgotten: Forgotten) -> int:
        """Removes entries, and announces it before and after: a process that copied rows in between drops them, too.

        The removal is repeated a little later, for a replica that was writing a copy back and had not heard of it.
        """
        self._tiers.forget(forgotten)
        num_evicted = await self._with_admin(_evict_announced, 0, remove, forgotten)
        self._tiers.forget(forgotten)
        if self._admin is not None:
            await asyncio.sleep(self._restore_s)
            await self._with_admin(remove, 0)
        return num_evicted


def _evict_announced(admin: CacheAdmin, remove: Callable[[CacheAdmin], int], forgotten: Forgotten) -> int:
    admin.tell_to_forget(forgotten)
    num_evicted = remove(admin)
    admin.tell_to_forget(forgotten)
    return num_evicted
