"""Operators' access to the shared cache: describes, pins, counts and removes entries.

These calls are rare and never part of a request, so each of them may take seconds. Unlike the store they raise when
Redis fails, since an operator who removes an image must know whether it is gone. Synchronous: call them from threads.

Commands in use: STRLEN, PTTL, OBJECT FREQ, PERSIST, PEXPIRE, EXISTS, UNLINK, SCAN, INFO, SET, PUBLISH.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lookonce.content_key import ContentKey
from lookonce.errors import UnavailableError
from lookonce.forgotten import Forgotten, new_token, to_message
from lookonce.store.cache_names import FORGET_CHANNEL, FORGET_TOKEN, data_key, metadata_key
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.link import RedisLink
from lookonce.store.redis.miss_reason import UNREACHABLE_REASONS, MissReason, RedisReplyError, RedisTroubleError
from lookonce.store.redis.node import RedisNode

ResultT = TypeVar("ResultT")

_SCAN_COUNT = 500
# A server may return more names than SCAN asked for, but not without limit.
_MAX_SCANNED = 1 << 20
_MAX_DIGITS = 20
_TIMEOUT_S = 5.0
# PTTL returns this for a key that does not exist, and -1 for one that never expires.
_NO_SUCH_KEY_MS = -2
_DATA_SUFFIX = b":e"
_METADATA_SUFFIX = b":m"


@dataclass(frozen=True, slots=True)
class EntryStatistics:
    """Figures that Redis keeps about one entry."""

    # Header and rows.
    num_bytes: int
    # Seconds until the entry expires; None for a pinned one.
    ttl_s: float | None
    # Redis' logarithmic count of recent uses, 0..255; None where its eviction policy keeps none.
    frequency: int | None


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """Figures of a whole server, or the sum over the primaries of a cluster."""

    # Images with a matching name.
    num_entries: int
    used_bytes: int
    # 0 means no limit.
    max_bytes: int
    # Keys that Redis evicted since it started.
    num_evictions: int


class CacheAdmin:
    """Administration of one Redis URL. Thread-safe.

    Every method raises UnavailableError when Redis refused a command or did not answer. A part of the call may have
    taken effect by then; all calls may be repeated.
    """

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises ConfigurationError for an unusable URL."""
        self._link = RedisLink(url, _TIMEOUT_S)

    def describe(self, keys: Sequence[ContentKey]) -> list[EntryStatistics | None]:
        """Returns the figures of each entry, None for one that does not exist."""
        return [self._run(functools.partial(_describe, key), data_key(key)) for key in keys]

    def pin(self, keys: Sequence[ContentKey]) -> list[bool]:
        """Keeps the entries until they are unpinned or removed. Returns which of them exist."""
        return [self._run(functools.partial(_pin, key), data_key(key)) for key in keys]

    def unpin(self, keys: Sequence[ContentKey], ttl_s: int) -> list[bool]:
        """Lets the entries expire in `ttl_s` seconds, as if they had just been used. Returns which of them exist."""
        return [self._run(functools.partial(_expire, key, ttl_s * 1000), data_key(key)) for key in keys]

    def evict(self, keys: Sequence[ContentKey]) -> int:
        """Removes rows and metadata of these images. Returns how many had rows."""
        return sum(self._run(functools.partial(_remove, key), data_key(key)) for key in keys)

    def totals(self, pattern: bytes) -> CacheTotals:
        """Counts the images with a matching name (see cache_names.py). Scans every name in the cache."""
        num_entries = used_bytes = max_bytes = num_evictions = 0
        for node in self._nodes():
            num_entries += sum(name.endswith(_DATA_SUFFIX) for names in self._scan(node, pattern) for name in names)
            info = self._run_on(node, _read_info)
            used_bytes += info.get(b"used_memory", 0)
            max_bytes += info.get(b"maxmemory", 0)
            num_evictions += info.get(b"evicted_keys", 0)
        return CacheTotals(num_entries, used_bytes, max_bytes, num_evictions)

    def evict_matching(self, pattern: bytes) -> int:
        """Removes all images with a matching name (see cache_names.py). Returns how many had rows."""
        num_images = 0
        for node in self._nodes():
            for names in self._scan(node, pattern):
                num_images += self._unlink(node, [name for name in names if name.endswith(_DATA_SUFFIX)])
                self._unlink(node, [name for name in names if name.endswith(_METADATA_SUFFIX)])
        return num_images

    def tell_to_forget(self, forgotten: Forgotten) -> None:
        """Makes all encoders and decoders drop their copies.

        A process that is cut off from Redis now drops all of its copies when it is connected again.
        """
        token = new_token()

        def publish(exchange: Exchange) -> None:
            # The token comes first, so that a process that misses the message finds out.
            exchange.send(b"SET", FORGET_TOKEN, token)
            exchange.read_status()
            exchange.send(b"PUBLISH", FORGET_CHANNEL, to_message(token, forgotten))
            exchange.read_integer()

        self._run(publish, FORGET_TOKEN)

    def close(self) -> None:
        """Closes the connections. A call in progress ends with UnavailableError at its next step."""
        self._link.close()

    def _run(self, action: Callable[[Exchange], ResultT], name: bytes) -> ResultT:
        """Runs `action` on the server that has the key `name`. Raises UnavailableError."""
        return _tried_twice(lambda: self._link.run(action, _deadline_s(), name))

    def _run_on(self, node: RedisNode, action: Callable[[Exchange], ResultT]) -> ResultT:
        return _tried_twice(lambda: self._link.run_on(node, action, _deadline_s()))

    def _nodes(self) -> list[RedisNode]:
        return _tried_twice(lambda: self._link.nodes(_deadline_s()))

    def _scan(self, node: RedisNode, pattern: bytes) -> Iterator[list[bytes]]:
        """Yields the matching names of one server in batches. A name may come more than once."""
        cursor = b"0"
        while True:

            def scan(exchange: Exchange, cursor: bytes = cursor) -> tuple[bytes, list[bytes]]:
                exchange.send(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
                return _read_batch(exchange)

            cursor, names = self._run_on(node, scan)
            yield names
            if cursor == b"0":
                return

    def _unlink(self, node: RedisNode, names: Sequence[bytes]) -> int:
        """Removes keys that a scan found on this server. Returns how many existed."""

        def unlink(exchange: Exchange) -> tuple[int, list[bytes]]:
            # One command per key, since the keys of one command must share a cluster slot.
            for name in names:
                exchange.send(b"UNLINK", name)
            num_removed, refused = 0, []
            for name in names:
                try:
                    num_removed += exchange.read_integer()
                except RedisReplyError:
                    refused.append(name)
            return num_removed, refused

        if not names:
            return 0
        num_removed, refused = self._run_on(node, unlink)
        # The slot has moved since the scan, or the server was demoted. The link follows both.
        return num_removed + sum(self._run(functools.partial(_unlink, name), name) for name in refused)


def _deadline_s() -> float:
    return time.monotonic() + _TIMEOUT_S


def _tried_twice(step: Callable[[], ResultT]) -> ResultT:
    """Returns the result of `step`, repeated once when no answer came. Raises UnavailableError.

    A restart of Redis or a firewall may have left a dead connection between two uses.
    """
    try:
        try:
            return step()
        except RedisTroubleError as trouble:
            if trouble.reason not in UNREACHABLE_REASONS:
                raise
            return step()
    except RedisTroubleError:
        raise UnavailableError(
            "the shared cache did not complete the call, which may be done in part: call again"
        ) from None


def _describe(key: ContentKey, exchange: Exchange) -> EntryStatistics | None:
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


def _pin(key: ContentKey, exchange: Exchange) -> bool:
    exchange.send(b"PERSIST", metadata_key(key))
    exchange.send(b"PERSIST", data_key(key))
    exchange.send(b"EXISTS", data_key(key))
    _, _, is_there = exchange.read_integer(), exchange.read_integer(), exchange.read_integer()
    return is_there == 1


def _expire(key: ContentKey, ttl_ms: int, exchange: Exchange) -> bool:
    exchange.send(b"PEXPIRE", metadata_key(key), ttl_ms)
    exchange.send(b"PEXPIRE", data_key(key), ttl_ms)
    _, is_there = exchange.read_integer(), exchange.read_integer()
    return is_there == 1


def _remove(key: ContentKey, exchange: Exchange) -> int:
    """Removes rows and metadata. Returns 1 when there were rows, else 0."""
    had_rows = _unlink(data_key(key), exchange)
    _unlink(metadata_key(key), exchange)
    return had_rows


def _unlink(name: bytes, exchange: Exchange) -> int:
    exchange.send(b"UNLINK", name)
    return exchange.read_integer()


def _read_batch(exchange: Exchange) -> tuple[bytes, list[bytes]]:
    """Reads the reply to SCAN: (next cursor, names)."""
    match exchange.read_nested(_MAX_SCANNED):
        case [bytes(cursor), list(values)]:
            names = [value for value in values if isinstance(value, bytes)]
            if len(names) == len(values):
                return cursor, names
    raise RedisTroubleError(MissReason.PROTOCOL)


def _read_info(exchange: Exchange) -> dict[bytes, int]:
    """Returns the whole numbers that INFO tells about memory and evictions, by field."""
    # Two commands: before Redis 7.0 INFO takes one section only.
    exchange.send(b"INFO", b"memory")
    exchange.send(b"INFO", b"stats")
    lines = ((exchange.read_bulk() or b"") + b"\r\n" + (exchange.read_bulk() or b"")).splitlines()
    fields = (line.partition(b":") for line in lines)
    return {name: int(value) for name, _, value in fields if len(value) <= _MAX_DIGITS and value.isdigit()}
