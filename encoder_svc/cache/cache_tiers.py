"""The two places where rows may be: this process and the shared cache. Looks up, reads and writes; never encodes.

Called on the event loop; Redis is talked to in threads of its own. Trouble with Redis is a miss or `stored = False`.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.cache.store_admission import StoreAdmission
from encoder_svc.metrics import EncoderMetrics
from lookonce import tracing
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.errors import EmbeddingNotCachedError, InvalidParameterError
from lookonce.forgotten import Forgotten
from lookonce.store.embedding_store import EmbeddingStore, WriteOutcome
from lookonce.store.forget_channel import token_in

ResultT = TypeVar("ResultT")

_LOCAL = "local"
_SHARED = "shared"

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of one embedding."""

    meta: EmbeddingMeta
    # Index of the first row.
    start: int
    # Raw bytes of whole rows.
    rows: memoryview = field(repr=False)


class CacheTiers:
    """Local cache in front of the shared one."""

    def __init__(
        self, local: LocalCache, store: EmbeddingStore | None, metrics: EncoderMetrics, *, store_workers: int
    ) -> None:
        """`store` None: there is no shared cache."""
        self.local = local
        self.store = store
        self._metrics = metrics
        self._admission = StoreAdmission()
        # Token of the last word to forget images that this process heard; None while it might miss one, and then
        # nothing is put back. Where nobody ever says such words (no function), everything may be.
        self.heard: Callable[[], bytes | None] | None = None
        self._num_forgets = 0
        self._num_queries: Counter[str] = Counter()
        self._num_hits: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(store_workers, thread_name_prefix="store")

    def find_local(self, key: ContentKey) -> LocalEmbedding | None:
        """What this process holds."""
        entry = self.local.get(key.value)
        self._count_query(_LOCAL, is_hit=entry is not None)
        return entry

    async def find_shared(self, key: ContentKey) -> EmbeddingMeta | None:
        """The description of what the shared cache holds; its life starts anew."""
        store = self.store
        if store is None:
            return None
        meta = await self._in_thread(lambda: _stat(store, key, touch=True))
        self._count_query(_SHARED, is_hit=meta is not None)
        return meta

    async def put(self, key: ContentKey, entry: LocalEmbedding, *, overwrite: bool) -> bool:
        """Keeps new rows in both tiers. Returns whether the shared cache holds rows of this key now."""
        self._keep_local(key, entry)
        return await self._write(key, entry, overwrite=overwrite)

    async def keep_stored(self, key: ContentKey, entry: LocalEmbedding) -> bool:
        """Prolongs the shared entry's life; writes it again where it went away. Returns whether it is there now.

        Not while this process could not hear that the image is to be forgotten, nor when it has just heard so.
        """
        store = self.store
        if store is None:
            return False
        if await self._in_thread(lambda: store.touch(key)):
            return True
        if not self.holds(key):
            return False
        num_forgets = self._num_forgets
        heard = None if self.heard is None else self.heard()
        if heard is None and self.heard is not None:
            return False

        def may_write() -> bool:
            # The last moment: a subscription may be dead without saying so, and writes may have to wait for a thread.
            return (heard is None or token_in(store) == heard) and num_forgets == self._num_forgets

        return await self._write(key, entry, may_write=may_write)

    async def lookup(self, keys: Sequence[ContentKey], *, touch: bool) -> list[EmbeddingMeta | None]:
        """The description of each key's rows, None where no tier holds them; `touch` prolongs the shared lives."""
        entries = [self.find_local(key) for key in keys]
        local = [None if entry is None else entry.meta for entry in entries]
        store = self.store
        if store is None:
            return local
        shared = await self._in_thread(lambda: [_stat(store, key, touch=touch) for key in keys])
        for meta in shared:
            self._count_query(_SHARED, is_hit=meta is not None)
        return [here or there for here, there in zip(local, shared, strict=True)]

    async def prewarm(self, key: ContentKey) -> bool:
        """Brings the rows from the shared cache into this process; whether they are here now."""
        store = self.store
        if store is None:
            return self.holds(key)
        num_forgets = self._num_forgets
        await self._in_thread(lambda: store.touch(key))
        if not self.holds(key):
            found = await self._in_thread(lambda: _read_rows(store, key, 0, 0))
            if found is not None and num_forgets == self._num_forgets:
                self._keep_local(key, LocalEmbedding(found.meta, found.rows))
        return self.holds(key)

    def holds(self, key: ContentKey) -> bool:
        """Whether this process has the rows; not counted as a question."""
        return key.value in self.local

    def forget(self, forgotten: Forgotten) -> None:
        """Drops rows from this process."""
        self._num_forgets += 1
        for value in self.local.keys_where(forgotten.includes):
            self.local.remove(value)
        self._report_local()

    def num_hits_and_misses(self, tier: str) -> tuple[int, int]:
        """Of the questions to "local" or "shared" so far."""
        return self._num_hits[tier], self._num_queries[tier] - self._num_hits[tier]

    async def read(self, key: ContentKey, row_offset: int, row_count: int) -> RowRange:
        """Rows [row_offset, row_offset + row_count) of one embedding, to its end for a count of 0.

        Raises EmbeddingNotCachedError, or InvalidParameterError for a range outside of the embedding.
        """
        entry = self.find_local(key)
        if entry is not None:
            start, stop = _checked_range(entry.meta, row_offset, row_count)
            width = entry.meta.row_bytes
            return RowRange(entry.meta, start, entry.rows[start * width : stop * width])
        store = self.store
        if store is None:
            raise not_cached()
        found = await self._in_thread(lambda: _read_rows(store, key, row_offset, row_count))
        self._count_query(_SHARED, is_hit=found is not None)
        if found is None:
            raise not_cached()
        return found

    def close(self) -> None:
        """Waits for the operations in work; the store itself stays open."""
        self._threads.shutdown()

    async def _write(
        self,
        key: ContentKey,
        entry: LocalEmbedding,
        *,
        overwrite: bool = False,
        may_write: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Never raises: rows that cannot be written can still be read from this process.

        `may_write` is asked right before, where Redis may be talked to.
        """
        store = self.store
        if store is None:
            return False
        if not self._admission.admit(entry.rows.nbytes, entry.encode_s):
            self._metrics.not_worth_storing.inc()
            return False

        def write() -> tuple[WriteOutcome, float]:
            started_s = time.monotonic()
            try:
                if not may_write():
                    return WriteOutcome.FAILED, 0.0
                outcome = store.try_write(key, entry.meta, entry.rows, overwrite=overwrite)
            except Exception:
                _log.exception("writing to the shared cache failed")
                outcome = WriteOutcome.FAILED
            return outcome, time.monotonic() - started_s

        with tracing.span("encode.store", num_bytes=entry.rows.nbytes):
            outcome, duration_s = await self._in_thread(write)
            tracing.annotate(outcome=outcome.value)
        self._metrics.store_seconds.observe(duration_s)
        if outcome in (WriteOutcome.STORED, WriteOutcome.LATE):
            self._admission.note_write(entry.rows.nbytes, duration_s)
        is_there = outcome in (WriteOutcome.STORED, WriteOutcome.EXISTS)
        if not is_there:
            self._metrics.unstored.inc()
        return is_there

    async def _in_thread(self, action: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, contextvars.copy_context().run, action)

    def _keep_local(self, key: ContentKey, entry: LocalEmbedding) -> None:
        self.local.put(key.value, entry)
        self._report_local()

    def _report_local(self) -> None:
        self._metrics.local_cache_bytes.set(self.local.num_bytes)
        self._metrics.local_cache_entries.set(len(self.local))

    def _count_query(self, tier: str, *, is_hit: bool) -> None:
        self._num_queries[tier] += 1
        self._num_hits[tier] += is_hit
        self._metrics.cache_queries.labels(tier).inc()
        if is_hit:
            self._metrics.cache_hits.labels(tier).inc()


def not_cached() -> EmbeddingNotCachedError:
    """The one answer for unknown, evicted and foreign digests alike."""
    return EmbeddingNotCachedError("no rows are cached for this digest; send the image's bytes", indexes=(0,))


def _stat(store: EmbeddingStore, key: ContentKey, *, touch: bool) -> EmbeddingMeta | None:
    meta = store.stat(key)
    if meta is not None and touch:
        store.touch(key)
    return meta


def _read_rows(store: EmbeddingStore, key: ContentKey, row_offset: int, row_count: int) -> RowRange | None:
    """All rows by one read, so that they come from one write of the entry."""
    meta = store.stat(key)
    if meta is None:
        return None
    start, stop = _checked_range(meta, row_offset, row_count)
    rows = memoryview(bytearray((stop - start) * meta.row_bytes))
    missing = store.read_rows(key, start, stop, rows, num_rows=meta.num_rows)
    return None if missing is not None else RowRange(meta, start, rows.toreadonly())


def _checked_range(meta: EmbeddingMeta, row_offset: int, row_count: int) -> tuple[int, int]:
    """[start, stop) inside of the embedding, never empty. Raises InvalidParameterError."""
    if row_offset >= meta.num_rows:
        raise InvalidParameterError("row_offset", f"must be below {meta.num_rows}, not {row_offset}")
    stop = row_offset + row_count if row_count else meta.num_rows
    if stop > meta.num_rows:
        left = meta.num_rows - row_offset
        raise InvalidParameterError("row_count", f"must be at most {left} from row {row_offset} on, not {row_count}")
    return row_offset, stop
