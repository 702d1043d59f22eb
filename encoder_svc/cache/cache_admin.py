"""What operators do to the shared cache: look at entries, pin them, remove them. Redis is asked through redis-py.

Rare and never part of a request, so convenience counts more than speed here. Unlike the store it says when Redis is
away: whoever removes an image must know whether it happened. Synchronous: call it from threads.

Commands in use: STRLEN, PTTL, OBJECT FREQ, PERSIST, PEXPIRE, EXISTS, UNLINK, SCAN, INFO, SET, PUBLISH.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
import redis.cluster
import redis.connection
import redis.exceptions
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from lookonce.content_key import ContentKey
from lookonce.errors import UnavailableError
from lookonce.forgotten import Forgotten, new_token, to_message
from lookonce.store.cache_names import FORGET_CHANNEL, FORGET_TOKEN, data_key, metadata_key
from lookonce.store.redis.url import DeploymentKind, RedisUrl, parse_redis_url

ResultT = TypeVar("ResultT")

_SCAN_COUNT = 500
_TIMEOUT_S = 5.0
# What PTTL says of a key that is not there; of one without an end it says -1.
_EXPIRED = -2


@dataclass(frozen=True, slots=True)
class EntryStatistics:
    """What Redis knows about one entry."""

    # Header and rows.
    num_bytes: int
    # Until it expires, seconds; None for a pinned one.
    ttl_s: float | None
    # Redis' own logarithmic count of recent uses, 0..255; None where its policy keeps none.
    frequency: int | None


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """Figures of a whole server, or the sum over a cluster's."""

    # Images whose names match what was asked for.
    num_entries: int
    used_bytes: int
    # 0: no limit.
    max_bytes: int
    # Keys that the server pushed out since it started.
    num_evictions: int


class CacheAdmin:
    """One server or cluster. Every method raises UnavailableError when Redis does not do what it was told."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises ConfigurationError for an unusable URL."""
        self._url = parse_redis_url(url)
        self._opened: Any = None
        self._is_closed = False
        self._lock = threading.Lock()

    def describe(self, keys: Sequence[ContentKey]) -> list[EntryStatistics | None]:
        """None for entries that are not there."""
        return self._try(lambda: [self._describe(data_key(key)) for key in keys])

    def pin(self, keys: Sequence[ContentKey]) -> list[bool]:
        """The entries live until they are unpinned or removed. Returns which are there."""

        def persist(key: ContentKey) -> bool:
            self._client.persist(metadata_key(key))
            self._client.persist(data_key(key))
            return bool(self._client.exists(data_key(key)))

        return self._try(lambda: [persist(key) for key in keys])

    def unpin(self, keys: Sequence[ContentKey], ttl_s: int) -> list[bool]:
        """The entries live `ttl_s` seconds from now on, as if just used. Returns which are there."""

        def expire(key: ContentKey) -> bool:
            self._client.pexpire(metadata_key(key), ttl_s * 1000)
            return bool(self._client.pexpire(data_key(key), ttl_s * 1000))

        return self._try(lambda: [expire(key) for key in keys])

    def totals(self, pattern: bytes) -> CacheTotals:
        """Counts the images whose names match (see cache_names.py); looks at every name there is."""

        def sum_up() -> CacheTotals:
            names = self._client.scan_iter(match=pattern, count=_SCAN_COUNT)
            num_entries = sum(name.endswith(b":e") for name in names)
            infos = self._infos()
            used_bytes, max_bytes, num_evictions = (
                sum(int(info.get(name, 0)) for info in infos) for name in ("used_memory", "maxmemory", "evicted_keys")
            )
            return CacheTotals(num_entries, used_bytes, max_bytes, num_evictions)

        return self._try(sum_up)

    def evict(self, keys: Sequence[ContentKey]) -> int:
        """Removes these images. Returns how many had rows."""

        def unlink(key: ContentKey) -> int:
            had_rows = int(self._client.unlink(data_key(key)))
            self._client.unlink(metadata_key(key))
            return had_rows

        return self._try(lambda: sum(unlink(key) for key in keys))

    def evict_matching(self, pattern: bytes) -> int:
        """Removes everything with such a name (see cache_names.py). Returns how many images had rows."""

        def unlink_all() -> int:
            num_images = 0
            names = (name for name in self._client.scan_iter(match=pattern, count=_SCAN_COUNT))
            while chunk := list(itertools.islice(names, _SCAN_COUNT)):
                for kind in (b":e", b":m"):
                    found = [name for name in chunk if name.endswith(kind)]
                    num_removed = int(self._client.unlink(*found)) if found else 0
                    num_images += num_removed if kind == b":e" else 0
            return num_images

        return self._try(unlink_all)

    def tell_to_forget(self, forgotten: Forgotten) -> None:
        """All encoders and decoders drop their copies; those that cannot be reached now, when they can again."""

        def tell() -> None:
            token = new_token()
            # Before the message, so that whoever misses it finds out.
            self._client.set(FORGET_TOKEN, token)
            self._client.publish(FORGET_CHANNEL, to_message(token, forgotten))

        self._try(tell)

    def close(self) -> None:
        """Closes the connections; what is being done ends with UnavailableError."""
        with self._lock:
            self._is_closed = True
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    @property
    def _client(self) -> Any:
        """A client of a cluster asks for its nodes when it is made, so not before it is needed."""
        with self._lock:
            if self._is_closed:
                raise OSError("closed")
            if self._opened is None:
                self._opened = _open_client(self._url)
            return self._opened

    def _infos(self) -> list[Mapping[str, Any]]:
        """INFO of every server that holds entries."""
        if self._url.kind is DeploymentKind.CLUSTER:
            return list(self._client.info(target_nodes="primaries").values())
        return [self._client.info()]

    def _describe(self, name: bytes) -> EntryStatistics | None:
        num_bytes = int(self._client.strlen(name))
        if not num_bytes:
            return None
        ttl_ms = int(self._client.pttl(name))
        if ttl_ms == _EXPIRED:
            return None
        try:
            frequency = int(self._client.object("FREQ", name))
        except redis.exceptions.ResponseError:
            frequency = None
        return EntryStatistics(num_bytes, None if ttl_ms < 0 else ttl_ms / 1000, frequency)

    def _try(self, action: Callable[[], ResultT]) -> ResultT:
        try:
            return action()
        except (redis.exceptions.RedisError, OSError):
            raise UnavailableError("the shared cache did not do it; it may be done in part: call again") from None


def _open_client(url: RedisUrl) -> Any:
    # Once more, for the connection that a restart of Redis has left behind in the pool.
    limits: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        "retry": Retry(NoBackoff(), 1),
    }
    if url.kind is DeploymentKind.SINGLE:
        return redis.Redis.from_url(url.node_url, **limits)
    options = {**redis.connection.parse_url(url.node_url), **limits}
    if options.pop("connection_class", None) is redis.connection.SSLConnection:
        options["ssl"] = True
    if url.kind is DeploymentKind.CLUSTER:
        nodes = [redis.cluster.ClusterNode(*address) for address in url.addresses]
        options.pop("db", None)
        return redis.cluster.RedisCluster(startup_nodes=nodes, **options)
    sentinels = redis.sentinel.Sentinel(url.addresses, sentinel_kwargs={**limits, **url.sentinel_options})
    return sentinels.master_for(url.service, **options)
