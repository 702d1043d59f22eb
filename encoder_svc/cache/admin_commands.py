"""Redis commands of operators' calls and their replies: on one entry, one lease, or a batch of names. Decides nothing.

Functions named `ask_…` send one command, and those named `read_…` read its reply; the others do both.
"""

from __future__ import annotations

from dataclasses import dataclass

from encoder_svc.cache.encode_lease import TOKEN_CHARS
from lookonce.content_key import ContentKey
from lookonce.store.cache_names import (
    DATA_SUFFIX,
    data_key,
    lease_key,
    metadata_key,
    revocation_key,
    revocation_of,
    tag_of_name,
)
from lookonce.store.codec import FILE_TAG_BYTES, FILE_TAGS_OFFSET, MAX_FILE_TAGS, parse_file_tags
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.miss_reason import MissReason, RedisReplyError, RedisTroubleError

# A server may return more names than SCAN asked for, but not without limit.
_MAX_SCANNED = 1 << 20
_MAX_DIGITS = 20
_LAST_TAG_BYTE = FILE_TAGS_OFFSET + MAX_FILE_TAGS * FILE_TAG_BYTES - 1
# PTTL returns this for a key that does not exist, and -1 for one that never expires.
_NO_SUCH_KEY_MS = -2
# Time to live of a key that a revocation changes: longer than a write takes.
_REVOCATION_MS = 60_000


@dataclass(frozen=True, slots=True)
class EntryStatistics:
    """Figures that Redis keeps about one entry."""

    # Header and rows.
    num_bytes: int
    # Seconds until the entry expires; None for a pinned one.
    ttl_s: float | None
    # Redis' logarithmic count of recent uses, 0..255; None where its eviction policy keeps none.
    frequency: int | None


def describe(key: ContentKey, exchange: Exchange) -> EntryStatistics | None:
    """Returns the figures of an entry, None if it does not exist."""
    exchange.send(b"STRLEN", data_key(key))
    exchange.send(b"PTTL", data_key(key))
    exchange.send(b"OBJECT", b"FREQ", data_key(key))
    num_bytes, ttl_ms = exchange.read_integer(), exchange.read_integer()
    try:
        frequency = exchange.read_nested(max_values=1)
    except RedisReplyError:
        # The eviction policy is not LFU, or the key does not exist.
        frequency = None
    if not num_bytes or ttl_ms == _NO_SUCH_KEY_MS:
        return None
    ttl_s = None if ttl_ms < 0 else ttl_ms / 1000
    return EntryStatistics(num_bytes, ttl_s, frequency if isinstance(frequency, int) else None)


def pin(key: ContentKey, exchange: Exchange) -> bool:
    """Takes the time to live from rows and metadata. Returns whether there are rows."""
    exchange.send(b"PERSIST", metadata_key(key))
    exchange.send(b"PERSIST", data_key(key))
    exchange.send(b"EXISTS", data_key(key))
    _, _, is_there = exchange.read_integer(), exchange.read_integer(), exchange.read_integer()
    return is_there == 1


def expire(key: ContentKey, ttl_ms: int, exchange: Exchange) -> bool:
    """Gives rows and metadata a time to live. Returns whether there are rows."""
    exchange.send(b"PEXPIRE", metadata_key(key), ttl_ms)
    exchange.send(b"PEXPIRE", data_key(key), ttl_ms)
    _, is_there = exchange.read_integer(), exchange.read_integer()
    return is_there == 1


def remove(key: ContentKey, exchange: Exchange) -> bool:
    """Removes rows and metadata. Returns whether there were rows."""
    ask_to_unlink(exchange, data_key(key))
    ask_to_unlink(exchange, metadata_key(key))
    had_rows, _ = exchange.read_integer(), exchange.read_integer()
    return had_rows > 0


def ask_to_unlink(exchange: Exchange, name: bytes) -> None:
    """Sends the command that deletes a key."""
    exchange.send(b"UNLINK", name)


def ask_for_rows(exchange: Exchange, name: bytes) -> None:
    """Asks whether the entry of this metadata has rows."""
    exchange.send(b"EXISTS", tag_of_name(name) + DATA_SUFFIX)


def ask_for_tags(exchange: Exchange, name: bytes) -> None:
    """Asks for the tags in the header of an entry."""
    # The seal is not verified: rows are served only if it is right, and it covers the tags.
    exchange.send(b"GETRANGE", name, FILE_TAGS_OFFSET, _LAST_TAG_BYTE)


def read_tags(exchange: Exchange) -> tuple[bytes, ...]:
    """Returns the tags of an entry's files, empty if they are not known."""
    try:
        return parse_file_tags(exchange.read_bulk() or b"")
    except RedisReplyError as refusal:
        if refusal.reason is MissReason.WRONG_TYPE:
            return ()
        raise


def revoke(key: ContentKey, exchange: Exchange) -> None:
    """Deletes the encode lease, and then changes the key that its holder watches while it writes."""
    ask_to_unlink(exchange, lease_key(key))
    _set(exchange, revocation_key(key))
    exchange.read_integer()
    exchange.read_status()


def ask_for_lease(exchange: Exchange, name: bytes) -> None:
    """Asks for the value of a lease."""
    exchange.send(b"GET", name)


def read_lease_tags(exchange: Exchange) -> tuple[bytes, ...]:
    """Returns the tags of the files that are encoded under a lease, empty if they are not known."""
    try:
        return parse_file_tags((exchange.read_bulk() or b"")[TOKEN_CHARS:])
    except RedisReplyError as refusal:
        if refusal.reason is MissReason.WRONG_TYPE:
            return ()
        raise


def ask_to_change_revocation(exchange: Exchange, name: bytes) -> None:
    """Changes the key that the holder of this lease watches while it writes."""
    _set(exchange, revocation_of(name))


def _set(exchange: Exchange, name: bytes) -> None:
    exchange.send(b"SET", name, b"", b"PX", _REVOCATION_MS)


def read_batch(exchange: Exchange) -> tuple[bytes, list[bytes]]:
    """Reads the reply to SCAN: (next cursor, names)."""
    match exchange.read_nested(_MAX_SCANNED):
        case [bytes(cursor), list(values)]:
            names = [value for value in values if isinstance(value, bytes)]
            if len(names) == len(values):
                return cursor, names
    raise RedisTroubleError(MissReason.PROTOCOL)


def read_info(exchange: Exchange) -> dict[bytes, int]:
    """Returns the whole numbers that INFO tells about memory and evictions, by field."""
    # Two commands: before Redis 7.0 INFO takes one section only.
    exchange.send(b"INFO", b"memory")
    exchange.send(b"INFO", b"stats")
    lines = ((exchange.read_bulk() or b"") + b"\r\n" + (exchange.read_bulk() or b"")).splitlines()
    fields = (line.partition(b":") for line in lines)
    return {name: int(value) for name, _, value in fields if len(value) <= _MAX_DIGITS and value.isdigit()}
