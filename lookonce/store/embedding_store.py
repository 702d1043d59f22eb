"""The shared cache of embeddings in Redis: stat, read rows, write.

Synchronous: call it from threads, never on an event loop. Redis is a cache, so every failure (dead, frozen or full
server, missing rights, foreign values) is a miss or a False within `budget_s` seconds. Failures are counted by reason
and never raised.

Commands in use, for access rules on `lookonce:*`: reading needs GETRANGE, STRLEN, PING, HELLO and, on Valkey, GET;
writing also needs EXISTS, SET, PEXPIRE, PTTL, UNLINK and, to read maxmemory, INFO; under a lease also GET, WATCH,
UNWATCH, MULTI and EXEC. Without HELLO entries are read in pieces. Without INFO no limit of the server is known.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lookonce import tracing
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.store import codec as embedding_codec
from lookonce.store.cache_names import data_key, metadata_key
from lookonce.store.codec import MAX_ENTRY_BYTES, NONCE_BYTES, EmbeddingCodec, PackedEntry
from lookonce.store.entry_reader import EntryReader
from lookonce.store.entry_writer import EXISTS, LEASE_LOST, METADATA_TTL_FACTOR, STORED, EntryWriter
from lookonce.store.metadata_reader import read_all_metadata, read_metadata
from lookonce.store.redis.circuit_breaker import BreakerState, CircuitBreaker
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.link import RedisLink
from lookonce.store.redis.miss_reason import (
    UNREACHABLE_REASONS,
    CacheMissError,
    CorruptEntryError,
    MissReason,
    RedisReplyError,
    RedisTroubleError,
)
from lookonce.store.refusal_log import RefusalLog
from lookonce.store.sealing import Checksum, Sealer
from lookonce.store.stats import StoreOperation, StoreStats

ResultT = TypeVar("ResultT")

# Reasons after which another attempt may succeed.
_LATE_REASONS = frozenset({MissReason.TIMEOUT, MissReason.SLOW})
# Over TCP larger entries are read in pieces. That is faster there (1.2 × for 24 MB), and a reply of 24 MB delayed a
# small GET by 19 ms. Over a Unix socket one command is better at any size (benchmarks/fetch_speed.py).
_MAX_WHOLE_BYTES_OVER_TCP = 4 << 20
# One value larger than maxmemory would evict everything and then fail.
_MAX_MEMORY_SHARE = 8


class WriteOutcome(enum.Enum):
    """Outcome of a write to the shared cache."""

    STORED = "stored"
    # The entry was there already.
    EXISTS = "exists"
    # The time budget ended during the transfer.
    LATE = "late"
    # Nothing was written, because the encode's lease is not held any more: it has expired, or was revoked.
    LEASE_LOST = "lease_lost"
    # The entry exceeds a limit, or Redis refused it or was unreachable.
    FAILED = "failed"


# Outcomes by their label in the counters.
_WRITE_OUTCOMES = {STORED: WriteOutcome.STORED, EXISTS: WriteOutcome.EXISTS, LEASE_LOST: WriteOutcome.LEASE_LOST}


class EmbeddingStore:
    """The shared cache behind one Redis URL. Thread-safe.

    An image is one immutable, sealed value under one key, written by one command.

    `budget_s`: longest time of one attempt in seconds, connecting included. `ttl_s`: time to live of an entry after a
    write or a touch, seconds. `max_entry_bytes`: larger entries are not written. `sealer`: checksums by default.
    `num_attempts`: attempts at a server that does not answer in time, each of up to `budget_s`, while the breaker is
    closed. More than 1 pays where a miss costs more than waiting. Rows are always read in one attempt.
    Raises ConfigurationError for an unusable URL.
    """

    def __init__(
        self,
        url: str,
        budget_s: float,
        ttl_s: int,
        max_entry_bytes: int,
        *,
        sealer: Sealer | None = None,
        breaker: CircuitBreaker | None = None,
        num_attempts: int = 1,
    ) -> None:
        self._link = RedisLink(url, budget_s)
        self._budget_s = budget_s
        self._ttl_ms = ttl_s * 1000
        self._max_entry_bytes = min(max_entry_bytes, MAX_ENTRY_BYTES)
        self._codec = EmbeddingCodec(sealer or Checksum())
        self._breaker = breaker or CircuitBreaker()
        self._num_attempts = num_attempts
        self._refusals = RefusalLog()
        self.stats = StoreStats()

    @property
    def state(self) -> BreakerState:
        """The state of the circuit breaker; Redis is not asked while it is OPEN."""
        return self._breaker.state

    def stat(self, key: ContentKey) -> EmbeddingMeta | None:
        """Returns the shape of an entry, or None. Reads the header only; rows are verified when they are read."""
        return self._find(
            StoreOperation.STAT, data_key(key), lambda exchange: self._reader(exchange, key).read_header().meta
        )

    def metadata(self, key: ContentKey) -> EmbeddingMeta | None:
        """Returns the shape of an image that was stored, or None. Its rows may have been evicted since."""
        name = metadata_key(key)
        return self._find(StoreOperation.METADATA, name, lambda exchange: read_metadata(exchange, self._codec, key))

    def metadata_of(self, keys: Sequence[ContentKey]) -> list[EmbeddingMeta | None]:
        """Returns for each key what `metadata` returns. Each server is asked once, in one round trip."""
        if len(keys) == 1:
            return [self.metadata(keys[0])]
        found: dict[int, EmbeddingMeta | None] = {}
        for positions in self._link.by_server([metadata_key(key) for key in keys], self._deadline_s()):
            found.update(zip(positions, self._find_together([keys[index] for index in positions]), strict=True))
        return [found[index] for index in range(len(keys))]

    def read_rows(
        self, key: ContentKey, start: int, stop: int, out: memoryview, *, num_rows: int | None = None
    ) -> MissReason | None:
        """Copies rows [start, stop) into `out`, which has exactly their size. Returns None, or the reason of a miss.

        After None every block has been verified, and all rows come from one write of the entry. After a miss the
        content of `out` is undefined and must not be used. `num_rows`: the number of rows that the entry should have,
        if known. It saves a round trip and allows a whole entry to be read by one command where that is faster.
        Raises ValueError when the range is empty or reversed or `out` is not writable and contiguous.
        """
        out = embedding_codec.as_bytes(out)
        if out.readonly or not 0 <= start < stop:
            raise ValueError(f"rows [{start}, {stop}) must be a range and their buffer writable")
        deadline_s = self._deadline_s()
        with tracing.redis_span(StoreOperation.READ_ROWS.value, num_bytes=out.nbytes):
            first = self._try_read(key, start, stop, out, deadline_s, num_rows)
            attempt = first
            if first.reason is MissReason.BLOCK_SEAL:
                # Either the entry was replaced between two pieces or it is damaged. A second read decides.
                attempt = self._try_read(key, start, stop, out, deadline_s, num_rows)
                if attempt.reason is MissReason.BLOCK_SEAL and attempt.nonce != first.nonce:
                    attempt = _ReadAttempt(MissReason.GENERATION, attempt.nonce, is_corrupt=False)
            if attempt.is_corrupt:
                self._discard(data_key(key), deadline_s)
            self._count(StoreOperation.READ_ROWS, attempt.reason.value if attempt.reason else "ok")
        return attempt.reason

    def try_write(
        self,
        key: ContentKey,
        meta: EmbeddingMeta,
        rows: memoryview,
        *,
        overwrite: bool = False,
        lease_token: bytes = b"",
    ) -> WriteOutcome:
        """Stores `rows` ([num_rows, (1 + num_levels) * hidden_size], `meta.size_bytes` bytes) if the key is free.

        Of two writers the first one's rows stay. `overwrite` replaces an entry; a pinned one stays pinned. With
        `lease_token`, an entry is added only under this encode lease, see entry_writer.py. Failures of Redis are
        outcomes. Raises ValueError when `rows` and `meta` do not fit together.
        """
        rows = embedding_codec.as_bytes(rows)
        entry = self._codec.pack(key.value, meta, rows, secrets.token_bytes(NONCE_BYTES), int(time.time()))
        outcome, label = WriteOutcome.FAILED, ""
        with tracing.redis_span(StoreOperation.WRITE.value, num_bytes=entry.size_bytes):
            try:
                # A slow write is not repeated: it would send all bytes once more over a link that is too slow.
                label = self._ask_again(
                    lambda exchange: self._write(
                        exchange, key, meta, entry, overwrite=overwrite, lease_token=lease_token
                    ),
                    data_key(key),
                    frozenset({MissReason.TIMEOUT}),
                )
                outcome = _WRITE_OUTCOMES.get(label, WriteOutcome.FAILED)
            except CacheMissError as miss:
                label = miss.reason.value
                outcome = WriteOutcome.LATE if miss.reason is MissReason.SLOW else WriteOutcome.FAILED
                self._refusals.note(miss.reason)
            self._count(StoreOperation.WRITE, label)
        return outcome

    def touch(self, key: ContentKey) -> bool:
        """Resets the entry's time to live. Returns whether it exists; False for any failure."""

        def expire(exchange: Exchange) -> bool:
            # XX: a pinned entry has no time to live and must not get one.
            exchange.send(b"EXISTS", data_key(key))
            exchange.send(b"PEXPIRE", data_key(key), self._ttl_ms, b"XX")
            exchange.send(b"PEXPIRE", metadata_key(key), self._ttl_ms * METADATA_TTL_FACTOR, b"XX")
            is_there, _, _ = exchange.read_integer(), exchange.read_integer(), exchange.read_integer()
            return is_there == 1

        return self._succeeds(StoreOperation.TOUCH, expire, data_key(key))

    def ping(self) -> bool:
        """Returns whether Redis answers. While the breaker is open this is False without a request."""

        def ask(exchange: Exchange) -> bool:
            exchange.send(b"PING")
            return exchange.read_status()

        return self._succeeds(StoreOperation.PING, ask)

    def ask(self, action: Callable[[Exchange], ResultT], name: bytes | None = None) -> ResultT:
        """Runs an exchange with Redis as one operation behind the breaker. Raises CacheMissError.

        `name`: one of the keys it uses, all of which are in one cluster slot; None if it uses no key and may run on any
        server. `action` may run again, even after Redis executed it, when the reply was lost.
        """
        return self._ask_again(action, name, _LATE_REASONS)

    def close(self) -> None:
        """Closes the connections. Every later operation is a miss."""
        self._link.close()

    def _ask_again(
        self, action: Callable[[Exchange], ResultT], name: bytes | None, reasons: frozenset[MissReason]
    ) -> ResultT:
        """Runs `action`, and repeats it up to `num_attempts` times when it failed for one of `reasons`."""
        for _ in range(self._num_attempts - 1):
            try:
                return self._ask(action, self._deadline_s(), name)
            except RedisTroubleError as trouble:
                if trouble.reason not in reasons:
                    raise
        return self._ask(action, self._deadline_s(), name)

    def _ask(self, action: Callable[[Exchange], ResultT], deadline_s: float, name: bytes | None) -> ResultT:
        """Runs `action` on a connection if there is time left and the breaker permits. Raises CacheMissError."""
        if time.monotonic() >= deadline_s:
            # An earlier step of the operation used up the time. The breaker does not count this as a failure.
            raise RedisTroubleError(MissReason.SLOW)
        permit = self._breaker.acquire()
        if permit is None:
            raise RedisTroubleError(MissReason.BREAKER_OPEN)

        def counted(exchange: Exchange) -> ResultT:
            try:
                return action(exchange)
            finally:
                self.stats.add_bytes_read(exchange.num_bulk_bytes)

        was_reached = True
        try:
            return self._link.run(counted, deadline_s, name)
        except RedisReplyError as refusal:
            if refusal.reason is MissReason.WRONG_TYPE:
                raise CorruptEntryError(MissReason.WRONG_TYPE) from refusal
            raise
        except RedisTroubleError as trouble:
            was_reached = trouble.reason not in UNREACHABLE_REASONS
            raise
        finally:
            self._breaker.report(permit, was_reached)

    def _find_together(self, keys: Sequence[ContentKey]) -> list[EmbeddingMeta | None]:
        """Reads the metadata of keys that one server has. Those with a fault are read alone, which deals with it."""
        if len(keys) == 1:
            return [self.metadata(keys[0])]
        with tracing.redis_span(StoreOperation.METADATA.value, num_keys=len(keys)):
            try:
                found = self.ask(partial(read_all_metadata, codec=self._codec, keys=keys), metadata_key(keys[0]))
            except CacheMissError as miss:
                self._count(StoreOperation.METADATA, miss.reason.value, len(keys))
                return [None] * len(keys)
            self._count(StoreOperation.METADATA, "ok", sum(isinstance(one, EmbeddingMeta) for one in found))
            self._count(StoreOperation.METADATA, MissReason.ABSENT.value, found.count(MissReason.ABSENT))
        return [
            one if isinstance(one, EmbeddingMeta) else None if one is MissReason.ABSENT else self.metadata(key)
            for key, one in zip(keys, found, strict=True)
        ]

    def _find(
        self, operation: StoreOperation, name: bytes, action: Callable[[Exchange], EmbeddingMeta]
    ) -> EmbeddingMeta | None:
        with tracing.redis_span(operation.value):
            try:
                meta = self.ask(action, name)
            except CacheMissError as miss:
                self._count(operation, miss.reason.value)
                if isinstance(miss, CorruptEntryError):
                    self._discard(name, self._deadline_s())
                return None
            self._count(operation, "ok")
            return meta

    def _succeeds(
        self, operation: StoreOperation, action: Callable[[Exchange], bool], name: bytes | None = None
    ) -> bool:
        with tracing.redis_span(operation.value):
            try:
                succeeded = self.ask(action, name)
            except CacheMissError as miss:
                self._count(operation, miss.reason.value)
                return False
            self._count(operation, "ok" if succeeded else MissReason.ABSENT.value)
            return succeeded

    def _try_read(
        self, key: ContentKey, start: int, stop: int, out: memoryview, deadline_s: float, num_rows: int | None
    ) -> _ReadAttempt:
        attempt = _ReadAttempt()
        wants_all = (start, stop) == (0, num_rows)
        row_bytes = out.nbytes // (stop - start)
        expected = self._codec.layout(num_rows, row_bytes) if num_rows and row_bytes else None

        def read(exchange: Exchange) -> None:
            reader = self._reader(exchange, key)
            may_be_whole = wants_all and (exchange.is_local or out.nbytes <= _MAX_WHOLE_BYTES_OVER_TCP)
            if may_be_whole and self._link.replies_by_reference(exchange):
                header = reader.begin_whole()
                attempt.nonce = header.nonce
                reader.finish_whole(header, out)
            else:
                header = reader.begin_range(start, stop, expected)
                attempt.nonce = header.nonce
                reader.finish_range(header, out)

        try:
            self._ask(read, deadline_s, data_key(key))
        except CacheMissError as miss:
            attempt.reason = miss.reason
            attempt.is_corrupt = isinstance(miss, CorruptEntryError)
        return attempt

    def _write(
        self,
        exchange: Exchange,
        key: ContentKey,
        meta: EmbeddingMeta,
        entry: PackedEntry,
        *,
        overwrite: bool,
        lease_token: bytes,
    ) -> str:
        """Writes the entry and its metadata. Returns the label of the outcome for the counters."""
        metadata = self._codec.pack_metadata(key.value, meta)
        writer = EntryWriter(exchange, key, entry, metadata, self._ttl_ms, lambda: self._limit_bytes(exchange))
        if overwrite:
            return writer.replace()
        return writer.add_under(lease_token) if lease_token else writer.add()

    def _limit_bytes(self, exchange: Exchange) -> int:
        """Returns the size of the largest entry that may be written."""
        max_memory_bytes = self._link.max_memory_bytes(exchange)
        if max_memory_bytes is None:
            return self._max_entry_bytes
        return min(self._max_entry_bytes, max_memory_bytes // _MAX_MEMORY_SHARE)

    def _reader(self, exchange: Exchange, key: ContentKey) -> EntryReader:
        return EntryReader(exchange, self._codec, data_key(key), key.value)

    def _discard(self, name: bytes, deadline_s: float) -> None:
        """Removes a corrupt value. Without the right to do so the value stays, and stays a miss."""

        def unlink(exchange: Exchange) -> None:
            exchange.send(b"UNLINK", name)
            exchange.read_integer()

        with tracing.redis_span(StoreOperation.DELETE.value):
            try:
                self._ask(unlink, deadline_s, name)
            except CacheMissError as miss:
                self._count(StoreOperation.DELETE, miss.reason.value)
            else:
                self._count(StoreOperation.DELETE, "discarded")

    def _count(self, operation: StoreOperation, outcome: str, number: int = 1) -> None:
        """Records an outcome that occurred `number` times in the counters and in the current span."""
        if number:
            self.stats.count(operation, outcome, number)
            tracing.annotate(outcome=outcome)

    def _deadline_s(self) -> float:
        return time.monotonic() + self._budget_s


@dataclass(slots=True)
class _ReadAttempt:
    """Outcome of one attempt to read rows."""

    # Reason of the miss; None when all rows arrived.
    reason: MissReason | None = None
    # Nonce of the write that was read; None without a valid header.
    nonce: bytes | None = None
    is_corrupt: bool = False
