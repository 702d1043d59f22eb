"""Whatever a Sentinel or a cluster node replies about the topology, the result is an address or a miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.store.entries import SMALL, fresh_key, make_rows, read, write
from tests.lookonce.store.faults import FaultProxy
from tests.lookonce.store.redis.redis_fleet import SERVICE

MakeStore = Callable[..., EmbeddingStore]

ROWS = make_rows(SMALL)
# Replies that describe neither a table of slots nor a primary.
NO_TOPOLOGY = [b"+OK", b":1", b"$-1", b"*0", b"*-1", b"*1\r\n:1"]


@pytest.mark.parametrize(
    "reply",
    [
        *NO_TOPOLOGY,
        b"*1\r\n*2\r\n:0\r\n:1",
        b"*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$4\r\nhost\r\n:6379",
        b"*1\r\n*3\r\n:5\r\n:4\r\n*2\r\n$4\r\nhost\r\n:6379",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$4\r\na..b\r\n:6379",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$4\r\nhost\r\n:99999",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n:1\r\n:6379",
        b"*1\r\n*3\r\n$1\r\na\r\n$1\r\nb\r\n*2\r\n$4\r\nhost\r\n:6379",
        b"-NOPERM this user may not",
        b"-LOADING it loads",
        b"nothing of the kind",
    ],
)
def test_a_malformed_table_of_slots_is_a_miss(fault_proxy: FaultProxy, make_store: MakeStore, reply: bytes) -> None:
    fault_proxy.faults.forged_reply = reply + b"\r\n"
    store = make_store(fault_proxy.url.replace("redis://", "redis+cluster://"))
    assert isinstance(read(store, fresh_key(), SMALL, 0, 1), MissReason)
    assert not write(store, fresh_key(), SMALL, memoryview(ROWS))


@pytest.mark.parametrize(
    "reply",
    [
        *NO_TOPOLOGY,
        b"*1\r\n*2\r\n$4\r\nname\r\n$5\r\ncache",
        b"*1\r\n*4\r\n$4\r\nname\r\n$5\r\ncache\r\n$5\r\nflags\r\n$6\r\nmaster",
        b"*1\r\n*1\r\n$4\r\nname",
        b"-NOPERM this user may not",
        b"nothing of the kind",
    ],
)
def test_a_malformed_reply_of_a_sentinel_is_a_miss(
    fault_proxy: FaultProxy, make_store: MakeStore, reply: bytes
) -> None:
    fault_proxy.faults.forged_reply = reply + b"\r\n"
    store = make_store(f"{fault_proxy.url.replace('redis://', 'redis+sentinel://')}/{SERVICE}")
    assert isinstance(read(store, fresh_key(), SMALL, 0, 1), MissReason)
    assert not write(store, fresh_key(), SMALL, memoryview(ROWS))
