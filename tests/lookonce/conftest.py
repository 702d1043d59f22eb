"""Real servers for the tests of the shared package."""

from __future__ import annotations

import io
import json
import logging
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import structlog

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.server.telemetry import configure_logging
from lookonce.store.embedding_store import EmbeddingStore
from tests.lookonce.store.faults import FaultProxy

# Long enough that a busy machine does not miss it, short enough for a test of a frozen server.
BUDGET_S = 2.0


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[EmbeddedRedis]:
    """A server for tests that neither stop it nor change its settings. Not emptied in between: use fresh keys."""
    with EmbeddedRedis(512 << 20) as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    """A server that the test may kill, freeze and reconfigure."""
    with EmbeddedRedis(256 << 20) as server:
        yield server


@pytest.fixture
def make_store() -> Iterator[Callable[..., EmbeddingStore]]:
    """`make_store(url, **changes)`: stores that are closed after the test."""
    stores: list[EmbeddingStore] = []

    def make(url: str, **changes: Any) -> EmbeddingStore:
        arguments: dict[str, Any] = {"budget_s": BUDGET_S, "ttl_s": 60, "max_entry_bytes": 64 << 20, **changes}
        stores.append(EmbeddingStore(url, **arguments))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def admin(own_redis: EmbeddedRedis) -> Iterator[Any]:
    """redis-py's own client on `own_redis`, to change settings and plant values."""
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def shared_admin(shared_redis: EmbeddedRedis) -> Iterator[Any]:
    """redis-py's own client on `shared_redis`, to plant values."""
    with redis.Redis.from_url(shared_redis.url) as client:
        yield client


@pytest.fixture
def fault_proxy(shared_redis: EmbeddedRedis, shared_admin: Any) -> Iterator[FaultProxy]:
    """A proxy in front of `shared_redis`. Closed before `shared_admin`, which its callbacks may use."""
    proxy = FaultProxy(urllib.parse.unquote(urllib.parse.urlsplit(shared_redis.url).path))
    yield proxy
    proxy.close()


@pytest.fixture
def log_lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Everything that this process logs, parsed."""
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    structlog.reset_defaults()
    for handler in [handler for handler in logging.getLogger().handlers if handler.name == "lookonce"]:
        logging.getLogger().removeHandler(handler)
