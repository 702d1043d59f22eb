"""Connections to one server are used again only while they are in step."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import redis
import redis.connection

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.redis.node import RedisNode


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def node(server: EmbeddedRedis) -> Iterator[RedisNode]:
    node = RedisNode(server.url, None, 2.0)
    yield node
    node.retire()


@pytest.fixture
def operator(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


def connection_id(node: RedisNode) -> int:
    """Returns the server's id of the connection that the node uses."""
    with node.exchange(time.monotonic() + 2) as exchange:
        exchange.send(b"CLIENT", b"ID")
        return exchange.read_integer()


def test_a_connection_is_used_again(node: RedisNode) -> None:
    assert len({connection_id(node) for _ in range(5)}) == 1


def test_a_connection_that_the_server_closed_is_not_used(node: RedisNode, operator: redis.Redis) -> None:
    for _ in range(3):
        first = connection_id(node)
        operator.client_kill_filter(_id=str(first))
        assert connection_id(node) != first


def test_a_connection_with_unexpected_bytes_is_not_used(node: RedisNode, operator: redis.Redis) -> None:
    """Unexpected bytes would be taken for the reply to the next command."""
    with node.exchange(time.monotonic() + 2) as exchange:
        exchange.send(b"CLIENT", b"ID")
        first = exchange.read_integer()
        exchange.send(b"SUBSCRIBE", b"channel")
        exchange.read_nested(4)
    operator.publish("channel", "unasked")
    # The server may answer the publisher before it writes to the subscriber, but both before it reads a next command.
    operator.ping()
    assert connection_id(node) != first


def test_a_connection_whose_block_failed_is_not_used(node: RedisNode) -> None:
    first = connection_id(node)
    with pytest.raises(KeyError), node.exchange(time.monotonic() + 2):
        raise KeyError
    assert connection_id(node) != first


def test_each_concurrent_thread_has_its_own_connection(node: RedisNode) -> None:
    found: list[int] = []
    together = threading.Barrier(8)

    def ask() -> None:
        with node.exchange(time.monotonic() + 10) as exchange:
            together.wait(10)
            exchange.send(b"CLIENT", b"ID")
            found.append(exchange.read_integer())

    for _ in range(3):
        found.clear()
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 8


def test_a_retired_node_closes_its_connections(server: EmbeddedRedis, operator: redis.Redis) -> None:
    node = RedisNode(server.url, None, 2.0)
    first = connection_id(node)
    with node.exchange(time.monotonic() + 2) as exchange:
        exchange.send(b"CLIENT", b"ID")
        assert exchange.read_integer() == first
        node.retire()
    deadline_s = time.monotonic() + 5
    while str(first) in {client["id"] for client in operator.client_list()} and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert str(first) not in {client["id"] for client in operator.client_list()}


_FORKING = """
import os, sys, time
from lookonce.store.redis.node import RedisNode

def connection_id(node):
    with node.exchange(time.monotonic() + 2) as exchange:
        exchange.send(b"CLIENT", b"ID")
        return exchange.read_integer()

node = RedisNode(sys.argv[1], None, 2.0)
print(connection_id(node), flush=True)
if os.fork() == 0:
    print(connection_id(node), flush=True)
    os._exit(0)
os.wait()
print(connection_id(node), flush=True)
"""


def test_a_forked_child_does_not_use_its_parents_connections(server: EmbeddedRedis) -> None:
    """Runs in a process of its own, since this one has threads and a fork of it might never end."""
    command = [sys.executable, "-c", _FORKING, server.url]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    before, of_child, after = finished.stdout.split()
    assert of_child != before
    assert after == before


@pytest.mark.parametrize("name", ["Connection", "SSLConnection", "UnixDomainSocketConnection"])
def test_this_version_of_redis_py_has_the_private_attributes_that_are_used(name: str) -> None:
    connection = getattr(redis.connection, name)()
    advice = (
        f"redis-py {redis.__version__} has changed: adapt lookonce/store/redis/node.py or its range in pyproject.toml"
    )
    assert hasattr(connection, "_sock"), advice
    assert callable(getattr(connection._parser, "on_connect", None)), advice


def test_the_private_socket_of_a_connection_is_its_open_socket(server: EmbeddedRedis, node: RedisNode) -> None:
    with node.exchange(time.monotonic() + 2) as exchange:
        path = exchange.socket.getpeername()
    assert path.endswith("server.sock"), f"redis-py {redis.__version__} keeps its socket elsewhere"
