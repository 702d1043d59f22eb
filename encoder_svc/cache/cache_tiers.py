"""The two tiers of the cache: rows in this process and rows in Redis. Looks up, reads and writes; never encodes.

Called on the event loop; Redis is talked to in threads of its own. Trouble with Redis is a miss or `stored = False`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.cache.removals import EncodeInProgress, ForgetWatch, Removals
from encoder_svc.cache.store_admission import StoreAdmission
from encoder_svc.metrics import EncoderMetrics
from lookonce import tracing
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.errors import EmbeddingNotCachedError, InvalidParameterError
from lookonce.forgotten import Forgotten
from lookonce.logs import get_logger
from lookonce.store.embedding_store import EmbeddingStore, WriteOutcome
from lookonce.store.forget_channel import token_in
from lookonce.threads import run_in_thread

_LOCAL = "local"
_SHARED = "shared"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Consecutive rows of one embedding."""

    meta: EmbeddingMeta
    # Index of the first row.
    start: int
    # Raw bytes of whole rows.
    rows: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class _ForgetState:
    """Removals known to this process when it decided to write a copy back. The write is dropped if they change."""

    # Removals in this process.
    num_forgets: int
    # Token of the last message; None where no messages are watched.
    token: bytes | None


class CacheTiers:
    """The local cache in front of the shared one."""

    def __init__(
        self,
        local: LocalCache,
        store: EmbeddingStore | None,
        metrics: EncoderMetrics,
        *,
        num_threads: int,
        forget_watch: ForgetWatch | None = None,
        settle_s: float = 0.0,
    ) -> None:
        """`store` None: there is no shared cache. `num_threads`: threads that talk to it.

        `forget_watch` None: no operator can remove images, so local copies may always be written back. `settle_s`: time
        that a removal waits before its second pass, seconds.
        """
        self.local = local
        self.store = store
        self._metrics = metrics
        self._admission = StoreAdmission()
        self.removals = Removals(forget_watch, settle_s)
        self._num_queries: Counter[str] = Counter()
        self._num_hits: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="store")
        metrics.local_cache_bytes.set_function(lambda: local.num_bytes)
        metrics.local_cache_entries.set_function(lambda: len(local))

    def find_local(self, key: ContentKey) -> LocalEmbedding | None:
        """Rows in this process, or None; counted as a query."""
        entry = self.local.get(key.value)
        self._count_query(_LOCAL, is_hit=entry is not None)
        return entry

    async def find_shared(self, key: ContentKey) -> EmbeddingMeta | None:
        """Description of the rows in the shared cache, or None; a hit restarts their time to live."""
        meta = await self._stat_shared(key)
        if self.store is not None:
            self._count_query(_SHARED, is_hit=meta is not None)
        return meta

    async def find_again(self, key: ContentKey) -> EmbeddingMeta | None:
        """Looks as `find_shared` for rows that were missing a moment ago; only a hit is counted as a query.

        Whoever waits for rows looks many times, and the hit ratio would depend on how long it waits.
        """
        meta = await self._stat_shared(key)
        if meta is not None:
            self._count_query(_SHARED, is_hit=True)
        return meta

    @asynccontextmanager
    async def encoding(
        self, key: ContentKey, file_tags: tuple[bytes, ...], arrival_token: bytes | None
    ) -> AsyncIterator[EncodeInProgress]:
        """Notices removals of the image since its arrival and during the block, for `put`; see `Removals.noticed`."""
        with self.removals.noticed(key, file_tags, arrival_token) as encode:
            if encode.token is None and self.store is not None:
                # Messages may be missed now, so the last one before the encode is asked for.
                encode.token = await run_in_thread(self._threads, token_in, self.store)
                encode.is_forgotten |= None not in (encode.token, arrival_token) and encode.token != arrival_token
            yield encode

    async def put(
        self, key: ContentKey, entry: LocalEmbedding, *, refresh: bool, encode: EncodeInProgress | None = None
    ) -> bool:
        """Keeps new rows in both tiers. Returns whether the shared cache holds rows of this key now.

        `refresh` overwrites rows that are there. Keeps nothing if the image was removed since `encode` began.
        """
        if encode is not None and encode.is_forgotten:
            return False
        self.local.put(key.value, entry)
        is_stored = await self._write(key, entry, refresh=refresh, encode=encode)
        # A removal that came during the write finds the rows.
        return is_stored and not (encode is not None and encode.is_forgotten)

    async def keep_stored(self, key: ContentKey, entry: LocalEmbedding) -> bool:
        """Prolongs the shared entry's life, or writes it again if it was evicted. Returns whether it is there now.

        Writes nothing while this process may miss messages about removed images, or when such a message comes
        meanwhile: the copy of an image that an operator removed must not return.
        """
        store = self.store
        if store is None:
            return False
        if await run_in_thread(self._threads, store.touch, key):
            return True
        if not self.holds(key):
            return False
        token = None
        if self.removals.watch is not None:
            token = self.removals.watch.last_token
            if token is None:
                return False
        return await self._write(key, entry, unless_changed=_ForgetState(self.local.num_forgets, token))

    async def lookup(self, keys: Sequence[ContentKey], *, touch: bool) -> list[EmbeddingMeta | None]:
        """The description of each key's rows, None where no tier holds them; `touch` prolongs shared entries' lives."""
        entries = [self.find_local(key) for key in keys]
        local = [None if entry is None else entry.meta for entry in entries]
        store = self.store
        if store is None:
            return local
        shared = await run_in_thread(self._threads, _stat_all, store, keys, touch=touch)
        for meta in shared:
            self._count_query(_SHARED, is_hit=meta is not None)
        return [here or there for here, there in zip(local, shared, strict=True)]

    async def prewarm(self, key: ContentKey) -> bool:
        """Brings rows from the shared cache into this process. Returns whether they are here now."""
        store = self.store
        if store is None:
            return self.holds(key)
        num_forgets = self.local.num_forgets
        await run_in_thread(self._threads, store.touch, key)
        if not self.holds(key):
            found = await run_in_thread(self._threads, _read_rows, store, key, 0, 0)
            if found is not None and num_forgets == self.local.num_forgets:
                self.local.put(key.value, LocalEmbedding(found.meta, found.rows))
        return self.holds(key)

    def holds(self, key: ContentKey) -> bool:
        """Whether this process has the rows; not counted as a query."""
        return key.value in self.local

    def forget(self, forgotten: Forgotten) -> None:
        """Drops rows from this process, and keeps those of encodes in progress from being stored."""
        self.local.forget(forgotten)
        self.removals.forget(forgotten)

    def num_hits_and_misses(self, tier: str) -> tuple[int, int]:
        """Hits and misses of one tier, "local" or "shared", since the start."""
        return self._num_hits[tier], self._num_queries[tier] - self._num_hits[tier]

    async def read(self, key: ContentKey, row_offset: int, row_count: int) -> CachedRows:
        """Rows [row_offset, row_offset + row_count) of one embedding, to its end for a count of 0.

        Raises EmbeddingNotCachedError, or InvalidParameterError for a range outside of the embedding.
        """
        entry = self.find_local(key)
        if entry is not None:
            start, stop = _checked_range(entry.meta, row_offset, row_count)
            width = entry.meta.row_bytes
            return CachedRows(entry.meta, start, entry.rows[start * width : stop * width])
        store = self.store
        if store is None:
            raise not_cached()
        found = await run_in_thread(self._threads, _read_rows, store, key, row_offset, row_count)
        self._count_query(_SHARED, is_hit=found is not None)
        if found is None:
            raise not_cached()
        return found

    def close(self) -> None:
        """Waits for the operations in progress; the store itself stays open."""
        self._threads.shutdown()

    async def _stat_shared(self, key: ContentKey) -> EmbeddingMeta | None:
        store = self.store
        return None if store is None else await run_in_thread(self._threads, _stat, store, key, touch=True)

    async def _write(
        self,
        key: ContentKey,
        entry: LocalEmbedding,
        *,
        refresh: bool = False,
        encode: EncodeInProgress | None = None,
        unless_changed: _ForgetState | None = None,
    ) -> bool:
        """Returns whether the shared cache holds rows of this key now.

        Never raises: rows that cannot be written can still be read from this process. Writes nothing when images were
        removed since `unless_changed`, or this image since `encode` began.
        """
        store = self.store
        if store is None:
            return False
        if not self._admission.admit(entry.rows.nbytes, entry.encode_s):
            self._metrics.not_worth_storing.inc()
            return False
        with tracing.span("encode.store", num_bytes=entry.rows.nbytes):
            outcome, duration_s = await run_in_thread(
                self._threads, self._try_write, store, key, entry, refresh, encode, unless_changed
            )
            tracing.annotate(outcome=outcome.value)
        self._metrics.store_seconds.observe(duration_s)
        if outcome in (WriteOutcome.STORED, WriteOutcome.LATE):
            self._admission.note_write(entry.rows.nbytes, duration_s)
        is_stored = outcome in (WriteOutcome.STORED, WriteOutcome.EXISTS)
        if not is_stored:
            self._metrics.unstored.inc()
        return is_stored

    def _try_write(
        self,
        store: EmbeddingStore,
        key: ContentKey,
        entry: LocalEmbedding,
        refresh: bool,
        encode: EncodeInProgress | None,
        unless_changed: _ForgetState | None,
    ) -> tuple[WriteOutcome, float]:
        """The outcome and its duration in seconds. Runs in a thread."""
        started_s = time.monotonic()
        try:
            # Checked here, at the last moment: a write may wait long for its thread.
            if unless_changed is not None and not self._is_unchanged(store, unless_changed):
                return WriteOutcome.FAILED, 0.0
            if encode is not None and encode.is_forgotten:
                return WriteOutcome.FAILED, 0.0
            outcome = WriteOutcome.LEASE_LOST
            if encode is not None and encode.lease_token:
                outcome = store.try_write(key, entry.meta, entry.rows, lease_token=encode.lease_token)
            if outcome is WriteOutcome.LEASE_LOST and self._may_write(store, encode):
                outcome = store.try_write(key, entry.meta, entry.rows, overwrite=refresh)
        except Exception:
            _log.exception("writing to the shared cache failed")
            outcome = WriteOutcome.FAILED
        return outcome, time.monotonic() - started_s

    def _may_write(self, store: EmbeddingStore, encode: EncodeInProgress | None) -> bool:
        """Whether rows may be written without a lease. In this order: what was heard is forgotten by then."""
        return encode is None or (self.removals.are_known_to(encode, store) and not encode.is_forgotten)

    def _is_unchanged(self, store: EmbeddingStore, state: _ForgetState) -> bool:
        """Whether no image was removed since. Asks Redis, since a subscription may be dead without any sign of it."""
        is_last_message = state.token is None or token_in(store) == state.token
        return is_last_message and state.num_forgets == self.local.num_forgets

    def _count_query(self, tier: str, *, is_hit: bool) -> None:
        self._num_queries[tier] += 1
        self._num_hits[tier] += is_hit
        self._metrics.cache_queries.labels(tier).inc()
        if is_hit:
            self._metrics.cache_hits.labels(tier).inc()


def not_cached() -> EmbeddingNotCachedError:
    """The error for unknown, evicted and other tenants' digests alike."""
    return EmbeddingNotCachedError("no rows are cached for this digest; send the image's bytes", indexes=(0,))


def _stat(store: EmbeddingStore, key: ContentKey, *, touch: bool) -> EmbeddingMeta | None:
    meta = store.stat(key)
    if meta is not None and touch:
        store.touch(key)
    return meta


def _stat_all(store: EmbeddingStore, keys: Sequence[ContentKey], *, touch: bool) -> list[EmbeddingMeta | None]:
    return [_stat(store, key, touch=touch) for key in keys]


def _read_rows(store: EmbeddingStore, key: ContentKey, row_offset: int, row_count: int) -> CachedRows | None:
    """Reads rows with one call of the store, so that they all come from one write of the entry; None for a miss."""
    meta = store.stat(key)
    if meta is None:
        return None
    start, stop = _checked_range(meta, row_offset, row_count)
    rows = memoryview(bytearray((stop - start) * meta.row_bytes))
    missing = store.read_rows(key, start, stop, rows, num_rows=meta.num_rows)
    return None if missing is not None else CachedRows(meta, start, rows.toreadonly())


def _checked_range(meta: EmbeddingMeta, row_offset: int, row_count: int) -> tuple[int, int]:
    """Returns [start, stop) inside of the embedding, never empty. Raises InvalidParameterError."""
    if row_offset >= meta.num_rows:
        raise InvalidParameterError("row_offset", f"must be below {meta.num_rows}, not {row_offset}")
    stop = row_offset + row_count if row_count else meta.num_rows
    if stop > meta.num_rows:
        left = meta.num_rows - row_offset
        raise InvalidParameterError("row_count", f"must be at most {left} from row {row_offset} on, not {row_count}")
    return row_offset, stop
