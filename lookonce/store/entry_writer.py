"""Writes one entry of the shared cache over an exchange: rows and metadata, at once or not at all.

An encode in progress writes under its lease, so that an image is not stored after an operator has removed it. A removal
revokes the leases of its images: it deletes the lease, and then changes `…:r`. The writer watches `…:r`, checks that
the lease is still there, and writes in a transaction, which fails if `…:r` has changed meanwhile. The lease itself is
not watched, because its renewals change it. All keys are in one slot of a cluster. No round trip is added: the check
goes out together with the question whether there is an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lookonce.content_key import ContentKey
from lookonce.store.cache_names import data_key, lease_key, metadata_key, revocation_key
from lookonce.store.codec import PackedEntry
from lookonce.store.redis.exchange import Argument, Exchange
from lookonce.store.redis.miss_reason import MissReason, RedisReplyError, RedisTroubleError

# Labels of outcomes for the counters.
STORED, EXISTS, TOO_LARGE, LEASE_LOST = "ok", "exists", "too_large", "lease_lost"
# PTTL returns this for a key that never expires, and -2 for one that does not exist.
_NEVER_EXPIRES = -1
# The metadata of an image outlives its rows: prompts can still be laid out after an eviction.
METADATA_TTL_FACTOR = 7
# Replies in a transaction: the array and one for each SET.
_MAX_REPLIES = 3


@dataclass(frozen=True, slots=True)
class EntryWriter:
    """One entry on its way to Redis. Its methods return the label of the outcome and raise RedisTroubleError."""

    exchange: Exchange
    key: ContentKey
    entry: PackedEntry
    # The packed shape of the image.
    metadata: bytes
    # Time to live of the rows, milliseconds.
    ttl_ms: int
    # Returns the size of the largest entry that may be written, bytes. It may ask Redis.
    limit_bytes: Callable[[], int]

    def replace(self) -> str:
        """Writes the entry in place of another one. A pinned entry stays pinned."""
        # One SET replaces the entry. It is never absent in between, and the command may be repeated.
        self.exchange.send(b"PTTL", data_key(self.key))
        is_pinned = self.exchange.read_integer() == _NEVER_EXPIRES
        if self.entry.size_bytes > self.limit_bytes():
            return TOO_LARGE
        life = () if is_pinned else (b"PX", self.ttl_ms)
        metadata_life = () if is_pinned else (b"PX", self.ttl_ms * METADATA_TTL_FACTOR)
        self.exchange.send_together((*self._set_rows(), *life), (*self._set_metadata(), *metadata_life))
        self.exchange.read_status()
        self.exchange.read_status()
        return STORED

    def add(self) -> str:
        """Writes the entry unless there is one."""
        self.exchange.send(b"EXISTS", data_key(self.key))
        refusal = self._refusal(self.exchange.read_integer() == 1)
        if refusal is not None:
            return refusal
        self.exchange.send_together(*self._new())
        was_first, _ = self.exchange.read_status(), self.exchange.read_status()
        return STORED if was_first else EXISTS

    def add_under(self, lease_token: bytes) -> str:
        """Writes the entry unless there is one. LEASE_LOST: nothing was written, because the lease is not held."""
        self.exchange.send_together(
            (b"WATCH", revocation_key(self.key)), (b"GET", lease_key(self.key)), (b"EXISTS", data_key(self.key))
        )
        is_watched = self._is_watched()
        holder, is_there = self.exchange.read_bulk(), self.exchange.read_integer() == 1
        refusal = self._refusal(is_there) if is_watched and holder == lease_token else LEASE_LOST
        if refusal is None:
            return self._add_watched()
        if is_watched:
            self.exchange.send(b"UNWATCH")
            self.exchange.read_status()
        return refusal

    def _is_watched(self) -> bool:
        """Reads the reply to WATCH. False without the right to use it."""
        try:
            return self.exchange.read_status()
        except RedisReplyError:
            return False

    def _refusal(self, is_there: bool) -> str | None:
        """Returns why the entry is not added, if so."""
        if is_there and self._holds_bytes():
            # SET NX alone would send all rows before the server could refuse them.
            return EXISTS
        return TOO_LARGE if self.entry.size_bytes > self.limit_bytes() else None

    def _add_watched(self) -> str:
        self.exchange.send_together((b"MULTI",), *self._new(), (b"EXEC",))
        for _ in ("MULTI", "rows", "metadata"):
            self.exchange.read_status()
        match self.exchange.read_nested(_MAX_REPLIES):
            case None:
                return LEASE_LOST
            case [b"OK", _]:
                return STORED
            case [None, _]:
                return EXISTS
        raise RedisTroubleError(MissReason.PROTOCOL)

    def _new(self) -> tuple[tuple[Argument, ...], ...]:
        """Returns the commands that add the entry."""
        return (
            (*self._set_rows(), b"NX", b"PX", self.ttl_ms),
            (*self._set_metadata(), b"PX", self.ttl_ms * METADATA_TTL_FACTOR),
        )

    def _set_rows(self) -> tuple[Argument, ...]:
        return b"SET", data_key(self.key), (self.entry.header, *self.entry.blocks)

    def _set_metadata(self) -> tuple[Argument, ...]:
        return b"SET", metadata_key(self.key), self.metadata

    def _holds_bytes(self) -> bool:
        """Returns whether an existing value is not empty, and removes an empty one, which readers treat as absent."""
        self.exchange.send(b"STRLEN", data_key(self.key))
        if self.exchange.read_integer():
            return True
        self.exchange.send(b"UNLINK", data_key(self.key))
        self.exchange.read_integer()
        return False
