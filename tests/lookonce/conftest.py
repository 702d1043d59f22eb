"""A proxy that breaks connections, and a client for planting values, for tests of the shared package."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lookonce.local.redis_server import EmbeddedRedis
from tests.lookonce.store.faults import FaultProxy


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
