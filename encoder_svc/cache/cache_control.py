"""Pins, prewarms and removes embeddings: in this process, in the shared cache, and by a message in other processes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from encoder_svc.cache.admin_commands import EntryStatistics
from encoder_svc.cache.cache_admin import CacheAdmin, CacheTotals, Removal, RemovedEntries
from encoder_svc.cache.cache_tiers import CacheTiers
from lookonce.content_key import ContentKey, EncoderFingerprint, ImageDigest, Tenant, file_tag
from lookonce.errors import UnavailableError
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


@dataclass(frozen=True, slots=True)
class Eviction:
    """The entries that a call removed from the shared cache."""

    # Entries with rows, those whose files are not known included.
    num_entries: int
    # For each image of the call, in its order.
    images: list[RemovedEntries]


class CacheControl:
    """Operators' actions on the caches. Without a shared cache they concern this process only.

    Called on the event loop; Redis is talked to in threads. Methods that talk to Redis raise UnavailableError if it
    does not answer before `until_s` on the monotonic clock or within seconds, and CacheAccessError if it refuses the
    user a command.
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
        to write a local copy back, and the `settle_s` of all replicas, seconds.
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

    async def shared_statistics(self, *, until_s: float = math.inf) -> TierStatistics:
        """The state of the shared cache.

        Entries are those of this encoder; bytes, capacity and evictions belong to the whole server; hits and misses are
        those of this process. Raises as described for the class.
        """
        pattern = pattern_of_fingerprint(self._fingerprint)
        totals = await self._with_admin(CacheAdmin.totals, CacheTotals(0, 0, 0, 0), pattern, until_s=until_s)
        num_hits, num_misses = self._tiers.num_hits_and_misses("shared")
        return TierStatistics(
            totals.num_entries, totals.used_bytes, totals.max_bytes, num_hits, num_misses, totals.num_evictions
        )

    async def describe(self, keys: Sequence[ContentKey], *, until_s: float = math.inf) -> list[EntryStatistics | None]:
        """The shared cache's entry of each image, None where it has none."""
        nothing: list[EntryStatistics | None] = [None] * len(keys)
        return await self._with_admin(CacheAdmin.describe, nothing, keys, until_s=until_s)

    async def pin(self, keys: Sequence[ContentKey], *, unpin: bool, until_s: float = math.inf) -> list[bool]:
        """Pins or unpins images. Returns for each whether the shared cache has it."""
        nothing = [False] * len(keys)
        if unpin:
            return await self._with_admin(CacheAdmin.unpin, nothing, keys, self._ttl_s, until_s=until_s)
        return await self._with_admin(CacheAdmin.pin, nothing, keys, until_s=until_s)

    async def prewarm(self, key: ContentKey, *, until_s: float = math.inf) -> bool:
        """Brings rows from the shared cache into this process. Returns whether they are here now.

        False if no cache has them, or if they exceed the capacity of this process.
        """
        if await self._tiers.prewarm(key):
            return True
        # The tiers take trouble with Redis for a miss. This question raises instead.
        (entry,) = await self.describe([key], until_s=until_s)
        if entry is None or await self._tiers.prewarm(key):
            return self._tiers.holds(key)
        if entry.num_bytes > self._tiers.local.capacity_bytes:
            return False
        raise UnavailableError("the shared cache has the rows and did not deliver them: call again")

    async def evict(
        self, digests: Sequence[ImageDigest], keys: Sequence[ContentKey], tenant: Tenant, *, until_s: float = math.inf
    ) -> Eviction:
        """Removes all entries of these files everywhere: of any encoder, with any options, and pairs of video frames.

        `keys` are entries of the files that are certain to exist under these names only, also if they carry no file
        tags. Raises UnavailableError unless it is sure that the shared cache has none of them left. An encode that
        began before the call does not store its rows after it.
        """
        tags = [file_tag(digest, tenant) for digest in digests]
        pattern = pattern_of_tenant(tenant)

        def remove(admin: CacheAdmin) -> Removal:
            unique = list(dict.fromkeys(keys))
            found = dict(zip(unique, admin.evict(unique, until_s=until_s), strict=True))
            removal = admin.evict_files(pattern, tags, until_s=until_s)
            removal.num_entries += sum(found.values())
            for key, had_rows in found.items():
                removal.by_file[file_tag(key.digest, tenant)].num_images += had_rows
            return removal

        def revoke(admin: CacheAdmin) -> None:
            admin.revoke_leases_in(pattern, tags, until_s=until_s)

        nothing = Removal({tag: RemovedEntries() for tag in tags})
        removal = await self._evict(remove, revoke, nothing, Forgotten.of_files(tags), until_s)
        return Eviction(removal.num_entries, [removal.by_file[tag] for tag in tags])

    async def evict_pairs(self, keys: Sequence[ContentKey], *, until_s: float = math.inf) -> Eviction:
        """Removes these pairs of video frames everywhere, and no other pairs of their frames. Raises as `evict`."""

        def remove(admin: CacheAdmin) -> list[bool]:
            return admin.evict(keys, until_s=until_s)

        def revoke(admin: CacheAdmin) -> None:
            admin.revoke_leases(keys, until_s=until_s)

        found = await self._evict(remove, revoke, [False] * len(keys), Forgotten.of(keys), until_s)
        return Eviction(sum(found), [RemovedEntries(num_pairs=int(had_rows)) for had_rows in found])

    async def evict_all(self, *, until_s: float = math.inf) -> int:
        """Removes all images of this encoder everywhere. Returns how many there were; raises as `evict`."""
        return await self._evict_matching(pattern_of_fingerprint(self._fingerprint), until_s)

    async def evict_tenant(self, tenant: Tenant, *, until_s: float = math.inf) -> int:
        """Removes all images of a tenant everywhere, those of other encoders too. Returns and raises as `evict_all`."""
        return await self._evict_matching(pattern_of_tenant(tenant), until_s)

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

    async def _evict_matching(self, pattern: bytes, until_s: float) -> int:
        def remove(admin: CacheAdmin) -> int:
            return admin.evict_matching(pattern, until_s=until_s)

        def revoke(admin: CacheAdmin) -> None:
            admin.revoke_leases_in(pattern, until_s=until_s)

        return await self._evict(remove, revoke, 0, EVERYTHING, until_s)

    async def _evict(
        self,
        remove: Callable[[CacheAdmin], ResultT],
        revoke: Callable[[CacheAdmin], None],
        nothing: ResultT,
        forgotten: Forgotten,
        until_s: float,
    ) -> ResultT:
        """Removes entries, and announces it before and after: a process that copied rows in between drops them, too.

        A little later, every encode that began before has its lease, and a replica that was writing a copy back has
        finished. Then the leases are revoked, and after that the removal is repeated: an encode whose lease was gone by
        the time it was looked for has stored its rows before. A healthy process may have copied these rows, so the
        repetition is announced, too. An image that arrives here after the return is stored again.

        Returns the result of the first pass, `nothing` without a shared cache. Raises UnavailableError if the shared
        cache had another primary at the end than at the beginning: entries may have survived on the new one.
        """
        self._tiers.forget(forgotten)
        if self._admin is None:
            return nothing
        admin, threads = self._admin, self._threads
        primaries = await run_in_thread(threads, admin.agreed_primaries, until_s=until_s)
        removed, _ = await run_in_thread(threads, _evict_announced, admin, remove, forgotten, until_s)
        self._tiers.forget(forgotten)
        await asyncio.sleep(self._restore_s)
        await run_in_thread(threads, revoke, admin)
        _, token = await run_in_thread(threads, _evict_announced, admin, remove, forgotten, until_s)
        self._tiers.forget(forgotten)
        await self._tiers.removals.heard(token)
        if await run_in_thread(threads, admin.agreed_primaries, until_s=until_s) != primaries:
            raise UnavailableError("the shared cache changed its primary during the removal: call again")
        return removed


def _evict_announced(
    admin: CacheAdmin, remove: Callable[[CacheAdmin], ResultT], forgotten: Forgotten, until_s: float
) -> tuple[ResultT, bytes]:
    """Returns the result of `remove`, and the token of the message after it."""
    admin.tell_to_forget(forgotten, until_s=until_s)
    removed = remove(admin)
    return removed, admin.tell_to_forget(forgotten, until_s=until_s)
