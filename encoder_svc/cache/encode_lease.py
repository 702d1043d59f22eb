"""The encode lease: decides which of all encoder replicas encodes an image. It is kept in Redis beside the entry.

Synchronous: call it from threads. Correctness never depends on a lease: entries are content-addressed and written once,
so two holders cost an extra encode and nothing else. A replica that cannot reach Redis encodes.

A lease is a token under `…:l` with a time to live. Behind the token stand the tags of the image's files, so that an
operator who removes a file finds the encodes in progress and revokes their leases (cache_admin.py). Rows are stored
under a lease only as long as it is held (lookonce/store/entry_writer.py).

Only its holder renews and releases a lease: both compare the token under WATCH and act in MULTI/EXEC, as access rules
often forbid server-side scripts. The end of an encode is announced on the channel `…:d`, which wakes the waiting
replicas.

Commands in use: SET, PTTL, WATCH, UNWATCH, GET, MULTI, EXEC, PEXPIRE, UNLINK, PUBLISH.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from lookonce import tracing
from lookonce.content_key import ContentKey
from lookonce.store.cache_names import done_channel, lease_key
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.exchange import Argument, Exchange
from lookonce.store.redis.miss_reason import CacheMissError, CorruptEntryError, MissReason
from lookonce.store.stats import StoreOperation

_TOKEN_BYTES = 16
# Bytes of the token as text. The tags of the files follow it.
TOKEN_CHARS = 2 * _TOKEN_BYTES
# PTTL returns this for a key that never expires, which cannot be a lease.
_NEVER_EXPIRES = -1


class LeaseState(enum.Enum):
    """Result of an attempt to acquire a lease."""

    HELD = "held"
    # Another replica holds it.
    BUSY = "busy"
    # Redis gave no answer: proceed without a lease.
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class LeaseAttempt:
    """Result of `acquire` with the token and remaining time."""

    state: LeaseState
    # Proof of holding the lease, with the tags of the image's files; empty unless HELD.
    token: bytes = b""
    # Longest time until the lease ends if its holder dies now, seconds; 0 when UNAVAILABLE.
    remaining_s: float = 0.0


class EncodeLeases:
    """The encode leases of one process. Thread-safe."""

    def __init__(self, store: EmbeddingStore, ttl_s: float) -> None:
        """`ttl_s`: time to live of a lease that is not renewed, seconds."""
        self._store = store
        self.ttl_s = ttl_s
        self._ttl_ms = max(1, round(ttl_s * 1000))

    def acquire(self, key: ContentKey, file_tags: tuple[bytes, ...] = ()) -> LeaseAttempt:
        """Takes the lease if it is free. One round trip. `file_tags`: `file_tag` of each of the image's files."""
        token = secrets.token_hex(_TOKEN_BYTES).encode() + b"".join(file_tags)

        def take(exchange: Exchange) -> LeaseAttempt:
            exchange.send(b"SET", lease_key(key), token, b"NX", b"PX", self._ttl_ms)
            exchange.send(b"GET", lease_key(key))
            exchange.send(b"PTTL", lease_key(key))
            is_first, holder, remaining_ms = exchange.read_status(), exchange.read_bulk(), exchange.read_integer()
            # SET may find our own token: an earlier attempt succeeded, but its reply came too late.
            if is_first or holder == token:
                return LeaseAttempt(LeaseState.HELD, token, self.ttl_s)
            if remaining_ms == _NEVER_EXPIRES:
                raise CorruptEntryError(MissReason.WRONG_TYPE)
            # Capped, so that a wrong reply never makes a replica wait longer than one lease before it tries again.
            return LeaseAttempt(LeaseState.BUSY, remaining_s=min(max(0, remaining_ms), self._ttl_ms) / 1000)

        try:
            with tracing.redis_span(StoreOperation.LEASE.value):
                attempt = self._store.ask(take, lease_key(key))
        except CacheMissError as miss:
            self._store.stats.count(StoreOperation.LEASE, miss.reason.value)
            return LeaseAttempt(LeaseState.UNAVAILABLE)
        self._store.stats.count(StoreOperation.LEASE, "ok")
        return attempt

    def renew(self, key: ContentKey, token: bytes) -> bool:
        """Resets the lease's time to live. Returns False when another replica holds it by now, or for any failure."""
        return self._if_mine(key, token, lambda: (b"PEXPIRE", lease_key(key), self._ttl_ms))

    def release(self, key: ContentKey, token: bytes, outcome: bytes) -> bool:
        """Releases the lease and announces `outcome` to the waiting replicas. Returns whether the lease was still held.

        The announcement is made in any case, since the encode has ended.
        """
        was_mine = self._if_mine(key, token, lambda: (b"UNLINK", lease_key(key)))

        def tell(exchange: Exchange) -> bool:
            exchange.send(b"PUBLISH", done_channel(key), outcome)
            exchange.read_integer()
            return True

        self._succeeds(key, tell)
        return was_mine

    def _if_mine(self, key: ContentKey, token: bytes, command: Callable[[], tuple[Argument, ...]]) -> bool:
        def act(exchange: Exchange) -> bool:
            replies = _try_if_mine(exchange, key, token, command)
            if replies is None:
                # A renewal that was under way when the encode ended came in between. There is one at most.
                replies = _try_if_mine(exchange, key, token, command)
            return replies == [1]

        return self._succeeds(key, act)

    def _succeeds(self, key: ContentKey, action: Callable[[Exchange], bool]) -> bool:
        try:
            with tracing.redis_span(StoreOperation.LEASE.value):
                succeeded = self._store.ask(action, lease_key(key))
        except CacheMissError as miss:
            self._store.stats.count(StoreOperation.LEASE, miss.reason.value)
            return False
        self._store.stats.count(StoreOperation.LEASE, "ok")
        return succeeded


def _try_if_mine(
    exchange: Exchange, key: ContentKey, token: bytes, command: Callable[[], tuple[Argument, ...]]
) -> list[int] | None:
    """Runs `command` if the lease has this token.

    Returns the reply, nothing if another replica holds the lease, and None if the lease changed meanwhile.
    """
    exchange.send(b"WATCH", lease_key(key))
    exchange.send(b"GET", lease_key(key))
    exchange.read_status()
    if exchange.read_bulk() != token:
        exchange.send(b"UNWATCH")
        exchange.read_status()
        return []
    exchange.send(b"MULTI")
    exchange.send(*command())
    exchange.send(b"EXEC")
    exchange.read_status()
    exchange.read_status()
    return exchange.read_transaction()
