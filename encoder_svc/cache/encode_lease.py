"""The encode lease: which one of all encoder replicas encodes an image. In Redis, beside the image's entry.

Synchronous: call it from threads. A lease is advice, never correctness: entries are content-addressed and written once,
so two holders cost an encode and nothing else. Whoever cannot reach Redis encodes.

A lease is a token under `…:l` with a time to live. It is renewed and released by its holder only: both compare the
token under WATCH and act in MULTI/EXEC, since server-side scripts are what access rules forbid first. Its end is told
on the channel `…:d`, which wakes those who wait.

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
# PTTL of what never ends: no lease of anybody.
_ENDLESS = -1


class LeaseState(enum.Enum):
    """How an attempt to get a lease ended."""

    HELD = "held"
    # Somebody else has it.
    BUSY = "busy"
    # Redis cannot say: do as if there were no leases.
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class LeaseAttempt:
    """The outcome of `acquire`."""

    state: LeaseState
    # Proves who holds it; empty unless HELD.
    token: bytes = b""
    # How long it lasts at most if its holder dies now, seconds; 0 when UNAVAILABLE.
    remaining_s: float = 0.0


class EncodeLeases:
    """Leases of one process. Thread-safe."""

    def __init__(self, store: EmbeddingStore, ttl_s: float) -> None:
        """`ttl_s`: life of a lease whose holder does not renew it, seconds."""
        self._store = store
        self.ttl_s = ttl_s
        self._ttl_ms = max(1, round(ttl_s * 1000))

    def acquire(self, key: ContentKey) -> LeaseAttempt:
        """Takes the lease if nobody has it. One round trip."""
        token = secrets.token_hex(_TOKEN_BYTES).encode()

        def take(exchange: Exchange) -> LeaseAttempt:
            exchange.send(b"SET", lease_key(key), token, b"NX", b"PX", self._ttl_ms)
            exchange.send(b"GET", lease_key(key))
            exchange.send(b"PTTL", lease_key(key))
            is_first, holder, remaining_ms = exchange.read_status(), exchange.read_bulk(), exchange.read_integer()
            # Not the first and yet the holder: an earlier attempt whose answer came too late.
            if is_first or holder == token:
                return LeaseAttempt(LeaseState.HELD, token, self.ttl_s)
            if remaining_ms == _ENDLESS:
                raise CorruptEntryError(MissReason.WRONG_TYPE)
            # Whatever the server says, nobody waits longer than for a lease of one's own before looking again.
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
        """Starts the lease's life anew. False when it is somebody else's by now, or Redis cannot say."""
        return self._if_mine(key, token, lambda: (b"PEXPIRE", lease_key(key), self._ttl_ms))

    def release(self, key: ContentKey, token: bytes, outcome: bytes) -> bool:
        """Gives the lease back and tells those who wait what came of it. False when it was not this holder's any more.

        They are told in any case: what they wait for has happened.
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
            exchange.send(b"WATCH", lease_key(key))
            exchange.send(b"GET", lease_key(key))
            exchange.read_status()
            if exchange.read_bulk() != token:
                exchange.send(b"UNWATCH")
                exchange.read_status()
                return False
            exchange.send(b"MULTI")
            exchange.send(*command())
            exchange.send(b"EXEC")
            exchange.read_status()
            exchange.read_status()
            return exchange.read_transaction() == [1]

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
