"""Operators' access to the shared cache: describes, pins, counts and removes entries.

These calls are rare and never part of a request, so each of them may take seconds. Unlike the store they raise when
Redis fails, since an operator who removes an image must know whether it is gone. Synchronous: call them from threads.

Commands in use: GETRANGE, STRLEN, PTTL, OBJECT FREQ, PERSIST, PEXPIRE, EXISTS, UNLINK, SCAN, INFO, SET, GET, PUBLISH.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from encoder_svc.cache import admin_commands as commands
from encoder_svc.cache.admin_commands import EntryStatistics
from lookonce.content_key import ContentKey
from lookonce.errors import CacheAccessError, UnavailableError
from lookonce.forgotten import Forgotten, new_token, to_message
from lookonce.store.cache_names import (
    DATA_SUFFIX,
    FORGET_CHANNEL,
    FORGET_TOKEN,
    METADATA_SUFFIX,
    data_key,
    lease_key,
    leases_in,
    tag_of_name,
)
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.link import RedisLink
from lookonce.store.redis.miss_reason import UNREACHABLE_REASONS, MissReason, RedisReplyError, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.url import Address

ResultT = TypeVar("ResultT")

_SCAN_COUNT = 500
# Longest time of one attempt of one step. There are two attempts, so a server that hangs costs twice this time.
ATTEMPT_S = 2.0
# Reasons that stay until somebody changes the user's rights or the password.
_REFUSED_REASONS = frozenset({MissReason.NOPERM, MissReason.AUTH})


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


@dataclass(slots=True)
class RemovedEntries:
    """Number of removed entries with rows that were made from one file."""

    # Entries of the file alone, one for each encoder and set of options.
    num_images: int = 0
    # Pairs of video frames with the file.
    num_pairs: int = 0


@dataclass(slots=True)
class Removal:
    """The entries with rows that one pass removed."""

    # By file tag; has every tag that was asked for. A pair of two of these files counts for both.
    by_file: dict[bytes, RemovedEntries]
    # All removed entries, those whose files are not known included.
    num_entries: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    """The names of one batch of a scan whose entries must go."""

    # Names of rows, and the tags of their files.
    rows: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    metadata: list[bytes] = field(default_factory=list)


class CacheAdmin:
    """Administration of one Redis URL. Thread-safe.

    Every method raises CacheAccessError if Redis refuses the user a command, and UnavailableError if it did not answer,
    refused a command for another reason, or `until_s` on the monotonic clock has come. A part of the call may have
    taken effect by then; all calls may be repeated.
    """

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises ConfigurationError for an unusable URL."""
        self._link = RedisLink(url, ATTEMPT_S)

    def describe(self, keys: Sequence[ContentKey], *, until_s: float = math.inf) -> list[EntryStatistics | None]:
        """Returns the figures of each entry, None for one that does not exist."""
        return [self._run(functools.partial(commands.describe, key), data_key(key), until_s) for key in keys]

    def pin(self, keys: Sequence[ContentKey], *, until_s: float = math.inf) -> list[bool]:
        """Keeps the entries until they are unpinned or removed. Returns which of them exist."""
        return [self._run(functools.partial(commands.pin, key), data_key(key), until_s) for key in keys]

    def unpin(self, keys: Sequence[ContentKey], ttl_s: int, *, until_s: float = math.inf) -> list[bool]:
        """Lets the entries expire in `ttl_s` seconds, as if they had just been used. Returns which of them exist."""
        return [
            self._run(functools.partial(commands.expire, key, ttl_s * 1000), data_key(key), until_s) for key in keys
        ]

    def evict(self, keys: Sequence[ContentKey], *, until_s: float = math.inf) -> list[bool]:
        """Removes rows and metadata of these entries. Returns which of them had rows."""
        return [self._run(functools.partial(commands.remove, key), data_key(key), until_s) for key in keys]

    def evict_files(self, pattern: bytes, file_tags: Sequence[bytes], *, until_s: float = math.inf) -> Removal:
        """Removes the entries with a matching name (see cache_names.py) that were made from one of these files.

        Entries whose files are not known go as well: those of an encoder without file tags, and metadata without rows.
        Scans every name in the cache.
        """
        removal = Removal({tag: RemovedEntries() for tag in file_tags})
        for node in self._nodes(until_s):
            for names in self._scan(node, pattern, until_s):
                batch = self._entries_of(node, names, removal.by_file.keys(), until_s)
                existed = self._unlink(node, list(batch.rows), until_s)
                self._unlink(node, batch.metadata, until_s)
                for tags, had_rows in zip(batch.rows.values(), existed, strict=True):
                    removal.num_entries += had_rows
                    for tag in set(tags) & removal.by_file.keys():
                        removal.by_file[tag].num_pairs += had_rows and len(tags) > 1
                        removal.by_file[tag].num_images += had_rows and len(tags) == 1
        return removal

    def revoke_leases(self, keys: Sequence[ContentKey], *, until_s: float = math.inf) -> None:
        """Keeps the encodes of these entries that are in progress from storing their rows (entry_writer.py)."""
        for key in keys:
            self._run(functools.partial(commands.revoke, key), lease_key(key), until_s)

    def revoke_leases_in(
        self, pattern: bytes, file_tags: Sequence[bytes] | None = None, *, until_s: float = math.inf
    ) -> None:
        """Does the same for all encodes with a matching name (see cache_names.py), or those of these files.

        Encodes whose files are not known go as well. Scans every name in the cache.
        """
        for node in self._nodes(until_s):
            for names in self._scan(node, leases_in(pattern), until_s):
                leases = names
                if file_tags is not None:
                    tags = self._each(node, names, commands.ask_for_lease, commands.read_lease_tags, until_s)
                    pairs = zip(names, tags, strict=True)
                    leases = [name for name, its in pairs if not its or not set(file_tags).isdisjoint(its)]
                # In this order, as the writer expects it.
                self._unlink(node, leases, until_s)
                self._each(node, leases, commands.ask_to_change_revocation, Exchange.read_status, until_s)

    def agreed_primaries(self, *, until_s: float = math.inf) -> tuple[Address, ...]:
        """Returns the addresses of the primaries in use. Raises UnavailableError also while a failover is in progress.

        A removal is complete only if this returns the same before and after it: a primary that is being replaced
        accepts commands whose effect is then lost.
        """
        return _tried_twice(lambda: self._link.agreed_primaries(_deadline_s(until_s)), until_s)

    def totals(self, pattern: bytes, *, until_s: float = math.inf) -> CacheTotals:
        """Counts the images with a matching name (see cache_names.py). Scans every name in the cache."""
        num_entries = used_bytes = max_bytes = num_evictions = 0
        for node in self._nodes(until_s):
            batches = self._scan(node, pattern, until_s)
            num_entries += sum(name.endswith(DATA_SUFFIX) for names in batches for name in names)
            info = self._run_on(node, commands.read_info, until_s)
            used_bytes += info.get(b"used_memory", 0)
            max_bytes += info.get(b"maxmemory", 0)
            num_evictions += info.get(b"evicted_keys", 0)
        return CacheTotals(num_entries, used_bytes, max_bytes, num_evictions)

    def evict_matching(self, pattern: bytes, *, until_s: float = math.inf) -> int:
        """Removes all images with a matching name (see cache_names.py). Returns how many had rows."""
        num_images = 0
        for node in self._nodes(until_s):
            for names in self._scan(node, pattern, until_s):
                rows = [name for name in names if name.endswith(DATA_SUFFIX)]
                num_images += sum(self._unlink(node, rows, until_s))
                self._unlink(node, [name for name in names if name.endswith(METADATA_SUFFIX)], until_s)
        return num_images

    def tell_to_forget(self, forgotten: Forgotten, *, until_s: float = math.inf) -> bytes:
        """Makes all encoders and decoders drop their copies. Returns the token of the message.

        A process that is cut off from Redis now drops all of its copies when it is connected again.
        """
        token = new_token()

        def publish(exchange: Exchange) -> None:
            # The token comes first, so that a process that misses the message finds out.
            exchange.send(b"SET", FORGET_TOKEN, token)
            exchange.read_status()
            exchange.send(b"PUBLISH", FORGET_CHANNEL, to_message(token, forgotten))
            exchange.read_integer()

        self._run(publish, FORGET_TOKEN, until_s)
        return token

    def close(self) -> None:
        """Closes the connections. A call in progress ends with UnavailableError at its next step."""
        self._link.close()

    def _run(self, action: Callable[[Exchange], ResultT], name: bytes, until_s: float) -> ResultT:
        """Runs `action` on the server that has the key `name`."""
        return _tried_twice(lambda: self._link.run(action, _deadline_s(until_s), name), until_s)

    def _run_on(self, node: RedisNode, action: Callable[[Exchange], ResultT], until_s: float) -> ResultT:
        return _tried_twice(lambda: self._link.run_on(node, action, _deadline_s(until_s)), until_s)

    def _nodes(self, until_s: float) -> list[RedisNode]:
        return _tried_twice(lambda: self._link.nodes(_deadline_s(until_s)), until_s)

    def _scan(self, node: RedisNode, pattern: bytes, until_s: float) -> Iterator[list[bytes]]:
        """Yields the matching names of one server in batches. A name may come more than once."""
        cursor = b"0"
        while True:

            def scan(exchange: Exchange, cursor: bytes = cursor) -> tuple[bytes, list[bytes]]:
                exchange.send(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
                return commands.read_batch(exchange)

            cursor, names = self._run_on(node, scan, until_s)
            yield names
            if cursor == b"0":
                return

    def _entries_of(self, node: RedisNode, names: Sequence[bytes], wanted: Set[bytes], until_s: float) -> _Batch:
        """Returns those of the names that belong to entries of the wanted files, or whose files are not known."""
        rows = [name for name in names if name.endswith(DATA_SUFFIX)]
        alone = [name for name in names if name.endswith(METADATA_SUFFIX)]
        found = dict(zip(rows, self._each(node, rows, commands.ask_for_tags, commands.read_tags, until_s), strict=True))
        batch = _Batch({name: tags for name, tags in found.items() if not tags or not wanted.isdisjoint(tags)})
        have_rows = self._each(node, alone, commands.ask_for_rows, Exchange.read_integer, until_s)
        batch.metadata.extend(name for name, has_rows in zip(alone, have_rows, strict=True) if not has_rows)
        batch.metadata.extend(tag_of_name(name) + METADATA_SUFFIX for name in batch.rows)
        return batch

    def _unlink(self, node: RedisNode, names: Sequence[bytes], until_s: float) -> list[bool]:
        """Removes keys that a scan found on this server. Returns which of them existed."""
        replies = self._each(node, names, commands.ask_to_unlink, Exchange.read_integer, until_s)
        return [num_removed > 0 for num_removed in replies]

    def _each(
        self,
        node: RedisNode,
        names: Sequence[bytes],
        ask: Callable[[Exchange, bytes], None],
        read: Callable[[Exchange], ResultT],
        until_s: float,
    ) -> list[ResultT]:
        """Sends one command for each key that a scan found on this server. Returns the replies in the same order."""

        def ask_all(exchange: Exchange) -> list[ResultT | None]:
            # One command per key, since the keys of one command must share a cluster slot.
            for name in names:
                ask(exchange, name)
            replies: list[ResultT | None] = []
            for _ in names:
                try:
                    replies.append(read(exchange))
                except RedisReplyError:
                    replies.append(None)
            return replies

        def ask_again(name: bytes) -> ResultT:
            def ask_one(exchange: Exchange) -> ResultT:
                ask(exchange, name)
                return read(exchange)

            return self._run(ask_one, name, until_s)

        if not names:
            return []
        replies = self._run_on(node, ask_all, until_s)
        # Refused because the slot has moved since the scan, or the server was demoted. The link follows both.
        return [ask_again(name) if reply is None else reply for name, reply in zip(names, replies, strict=True)]


def _deadline_s(until_s: float) -> float:
    return min(time.monotonic() + ATTEMPT_S, until_s)


def _tried_twice(step: Callable[[], ResultT], until_s: float) -> ResultT:
    """Returns the result of `step`. If no answer comes, repeats it once, but not after `until_s`.

    A restart of Redis or a firewall may have ended the connection since its last use. Raises UnavailableError, and
    CacheAccessError if Redis refused the user a command.
    """
    try:
        try:
            return step()
        except RedisTroubleError as trouble:
            if trouble.reason not in UNREACHABLE_REASONS or time.monotonic() >= until_s:
                raise
            return step()
    except RedisTroubleError as trouble:
        if trouble.reason in _REFUSED_REASONS:
            raise CacheAccessError(
                "the shared cache refuses this server's user a command that operators' calls need, so nothing is sure "
                "to be done: give the user the rights of lookonce-janitor in deploy/redis/users.acl"
            ) from None
        raise UnavailableError(
            "the shared cache did not complete the call, which may be done in part: call again"
        ) from None
