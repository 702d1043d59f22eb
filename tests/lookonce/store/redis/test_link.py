"""A link runs exchanges on the right server, follows a key once, and asks each connection about its server once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.link import RedisLink, _is_valkey_since_9, _parse_max_memory
from lookonce.store.redis.miss_reason import MissReason, RedisReplyError, RedisTroubleError
from lookonce.store.redis.node import RedisNode

BUDGET_S = 4.0


@pytest.fixture
def link(own_redis: EmbeddedRedis) -> Iterator[RedisLink]:
    with contextlib.closing(RedisLink(own_redis.url, BUDGET_S)) as link:
        yield link


def soon() -> float:
    return time.monotonic() + BUDGET_S


def connection_id(exchange: Exchange) -> int:
    exchange.send(b"CLIENT", b"ID")
    return exchange.read_integer()


def url_of_user(server: EmbeddedRedis, admin: Any, rules: str) -> str:
    """Returns the server's URL for a new user with these rights."""
    admin.execute_command("ACL", "SETUSER", "user", "on", ">pw", "~*", *rules.split())
    return server.url.replace("unix://", "unix://user:pw@")


# --- exchanges -------------------------------------------------------------------------------------------------------


def test_a_connection_is_used_again_when_all_replies_were_read(link: RedisLink) -> None:
    assert link.run(connection_id, soon()) == link.run(connection_id, soon())


def test_a_connection_with_an_unread_reply_is_not_used_again(link: RedisLink) -> None:
    first = link.run(connection_id, soon())
    link.run(lambda exchange: exchange.send(b"PING"), soon())
    assert link.run(connection_id, soon()) != first


def test_an_error_reply_raises_its_reason(link: RedisLink, admin: Any) -> None:
    admin.lpush("list", 1)

    def strlen(exchange: Exchange) -> int:
        exchange.send(b"STRLEN", b"list")
        return exchange.read_integer()

    with pytest.raises(RedisReplyError) as caught:
        link.run(strlen, soon(), b"list")
    assert caught.value.reason is MissReason.WRONG_TYPE


def test_an_exception_of_the_action_passes_through(link: RedisLink) -> None:
    def fail(_: Exchange) -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        link.run(fail, soon())


def test_a_deadline_that_has_passed_is_a_timeout(link: RedisLink) -> None:
    with pytest.raises(RedisTroubleError) as caught:
        link.run(connection_id, time.monotonic() - 1)
    assert caught.value.reason is MissReason.TIMEOUT


def test_a_single_server_is_the_only_node(link: RedisLink) -> None:
    (node,) = link.nodes(soon())
    assert link.run_on(node, connection_id, soon()) == link.run(connection_id, soon())


def test_a_closed_link_refuses_every_call(link: RedisLink) -> None:
    (node,) = link.nodes(soon())
    link.close()
    calls: list[Callable[[], object]] = [
        lambda: link.run(connection_id, soon()),
        lambda: link.run_on(node, connection_id, soon()),
        lambda: link.nodes(soon()),
    ]
    for call in calls:
        with pytest.raises(RedisTroubleError) as caught:
            call()
        assert caught.value.reason is MissReason.STORE_CLOSED


# --- following a key that has moved ----------------------------------------------------------------------------------


class MovingDeployment:
    """A deployment in which the next server takes over after each failure."""

    def __init__(self, *nodes: RedisNode) -> None:
        self._nodes = list(nodes)
        self.reasons: list[MissReason] = []

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        return self._nodes[0]

    def nodes(self, until_s: float) -> list[RedisNode]:
        return self._nodes

    def note_trouble(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        self.reasons.append(trouble.reason)
        if len(self._nodes) > 1:
            self._nodes.pop(0)
        return True

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        return MissReason.CLUSTER_DOWN

    def close(self) -> None:
        for node in self._nodes:
            node.retire()


@pytest.fixture
def dead() -> RedisNode:
    return RedisNode("unix:///nowhere/server.sock", None, BUDGET_S)


@pytest.fixture
def alive(shared_redis: EmbeddedRedis) -> Iterator[RedisNode]:
    node = RedisNode(shared_redis.url, None, BUDGET_S)
    yield node
    node.retire()


def link_over(deployment: MovingDeployment, monkeypatch: pytest.MonkeyPatch) -> RedisLink:
    monkeypatch.setattr("lookonce.store.redis.link.open_deployment", lambda url, budget_s: deployment)
    return RedisLink("redis://", BUDGET_S)


def test_keys_are_grouped_by_their_servers(dead: RedisNode, alive: RedisNode, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slots(MovingDeployment):
        def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
            if name == b"lost":
                raise RedisTroubleError(MissReason.CLUSTER_DOWN)
            return dead if name == b"a" else alive

    link = link_over(Slots(dead, alive), monkeypatch)
    assert link.by_server([b"a", b"b", b"lost", b"b", b"a", b"lost"], soon()) == [[0, 4], [1, 3], [2], [5]]


def test_a_key_that_has_moved_is_followed(dead: RedisNode, alive: RedisNode, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = MovingDeployment(dead, alive)
    assert link_over(deployment, monkeypatch).run(connection_id, soon(), b"key") > 0
    assert deployment.reasons == [MissReason.CONNECT_FAILED]


def test_a_key_is_followed_only_once(dead: RedisNode, alive: RedisNode, monkeypatch: pytest.MonkeyPatch) -> None:
    also_dead = RedisNode("unix:///nowhere/else.sock", None, BUDGET_S)
    deployment = MovingDeployment(dead, also_dead, alive)
    with pytest.raises(RedisTroubleError) as caught:
        link_over(deployment, monkeypatch).run(connection_id, soon(), b"key")
    assert caught.value.reason is MissReason.CLUSTER_DOWN, "the deployment decides what it means for the cache"
    assert len(deployment.reasons) == 2


def test_nothing_is_followed_when_half_of_the_budget_is_gone(
    dead: RedisNode, alive: RedisNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_over(MovingDeployment(dead, alive), monkeypatch)
    with pytest.raises(RedisTroubleError):
        link.run(connection_id, time.monotonic() + BUDGET_S / 4, b"key")


def test_a_command_for_one_server_is_not_repeated_on_another(
    dead: RedisNode, alive: RedisNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = MovingDeployment(dead, alive)
    with pytest.raises(RedisTroubleError):
        link_over(deployment, monkeypatch).run_on(dead, connection_id, soon())
    assert deployment.reasons == [MissReason.CONNECT_FAILED], "the deployment hears of it"


# --- what each connection asks once ----------------------------------------------------------------------------------


def test_the_memory_limit_is_read_once_per_connection(link: RedisLink, admin: Any) -> None:
    assert link.run(link.max_memory_bytes, soon()) == 256 << 20
    admin.config_set("maxmemory", 128 << 20)
    assert link.run(link.max_memory_bytes, soon()) == 256 << 20
    admin.client_kill_filter(_id=str(link.run(connection_id, soon())))
    assert link.run(link.max_memory_bytes, soon()) == 128 << 20


def test_no_limit_and_an_unknown_limit_are_none(own_redis: EmbeddedRedis, admin: Any, link: RedisLink) -> None:
    url = url_of_user(own_redis, admin, "+@all -info")
    with contextlib.closing(RedisLink(url, BUDGET_S)) as restricted:
        assert restricted.run(restricted.max_memory_bytes, soon()) is None
    admin.config_set("maxmemory", 0)
    assert link.run(link.max_memory_bytes, soon()) is None


def test_replies_by_reference_need_valkey_9(link: RedisLink, admin: redis.Redis) -> None:
    version = str(admin.info("server").get("valkey_version", "0"))
    assert link.run(link.replies_by_reference, soon()) is (int(version.partition(".")[0]) >= 9)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (b"used_memory:1\r\nmaxmemory:17\r\nmaxmemory_human:17B\r\n", 17),
        (b"maxmemory:0\r\n", None),
        (b"maxmemory:-1\r\n", None),
        (b"maxmemory:" + b"9" * 5000, None),
        (b"", None),
        (b"maxmemory", None),
    ],
)
def test_only_a_positive_number_is_a_memory_limit(info: bytes, expected: int | None) -> None:
    assert _parse_max_memory(info) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({b"server": b"valkey", b"version": b"9.1.2"}, True),
        ({b"server": b"valkey", b"version": b"10.0.0"}, True),
        ({b"server": b"valkey", b"version": b"8.1.0"}, False),
        ({b"server": b"redis", b"version": b"9.0.0"}, False),
        ({b"server": b"valkey", b"version": b"next"}, False),
        ({b"server": b"valkey"}, False),
        ({}, False),
    ],
)
def test_a_server_is_valkey_9_by_its_name_and_version(fields: dict[bytes, bytes], expected: bool) -> None:
    assert _is_valkey_since_9(fields) is expected
