"""Runs exchanges with Redis on the server that has the key, and follows the key when it has moved.

deployment.py names that server, node.py keeps the connections to it, and exchange.py speaks the protocol. Every failure
is a CacheMissError with a bounded reason. A connection on which anything unexpected happened is closed; there is no
attempt to resynchronise it.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from lookonce.store.redis.deployment import open_deployment
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.miss_reason import MissReason, RedisReplyError, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.url import Address

ResultT = TypeVar("ResultT")

_MAX_DIGITS = 20


class RedisLink:
    """Connections to one Redis URL. Thread-safe; concurrent exchanges use different connections.

    The deadline of a call bounds its exchange. Before that, finding the server may take half of `budget_s`, and so may
    each step of connecting.
    Raises ConfigurationError for an unusable URL.
    """

    def __init__(self, url: str, budget_s: float) -> None:
        self._deployment = open_deployment(url, budget_s)
        self._budget_s = budget_s
        self._is_closed = False
        # Answers of the server, by socket: after a restart or a failover the new connection asks again.
        self._max_memory: weakref.WeakKeyDictionary[socket.socket, int | None] = weakref.WeakKeyDictionary()
        self._by_reference: weakref.WeakKeyDictionary[socket.socket, bool] = weakref.WeakKeyDictionary()

    def run(self, action: Callable[[Exchange], ResultT], deadline_s: float, name: bytes | None = None) -> ResultT:
        """Runs `action` on the server that has the key `name`, until `deadline_s` on the monotonic clock.

        None stands for commands about no key. `action` runs a second time when the key has moved to another server and
        at least half of the budget is left. The connection is used again only if `action` read all its replies.
        Raises what `action` raises, and RedisTroubleError.
        """
        until_s = self._find_until_s(deadline_s)
        node, may_follow = self._node_of(name, until_s), True
        while True:
            try:
                with node.exchange(deadline_s) as exchange:
                    return action(exchange)
            except RedisTroubleError as trouble:
                may_have_moved = self._deployment.note_trouble(node, trouble)
                other = self._other_node(node, name, until_s) if may_have_moved and may_follow else None
                if other is None:
                    reason = self._deployment.reason_of(node, trouble)
                    if reason is trouble.reason:
                        raise
                    raise RedisTroubleError(reason) from trouble
            node, may_follow = other, False

    def by_server(self, names: Sequence[bytes], deadline_s: float) -> list[list[int]]:
        """Returns the positions of the keys in `names`, one list for each server. Ends at `deadline_s` at the latest.

        A key whose server is not known is alone in its list, so that its trouble is not that of others.
        """
        known: dict[RedisNode, list[int]] = {}
        others: list[list[int]] = []
        until_s = self._find_until_s(deadline_s)
        for index, name in enumerate(names):
            try:
                known.setdefault(self._node_of(name, until_s), []).append(index)
            except RedisTroubleError:
                others.append([index])
        return [*known.values(), *others]

    def nodes(self, deadline_s: float) -> list[RedisNode]:
        """Returns every primary, after a new lookup of the topology. Raises RedisTroubleError."""
        self._check_open()
        return self._deployment.nodes(self._find_until_s(deadline_s))

    def agreed_primaries(self, deadline_s: float) -> tuple[Address, ...]:
        """Returns the addresses of the primaries in use, if those who know the topology agree; see deployment.py.

        Raises RedisTroubleError, with reason MOVED while a failover is in progress.
        """
        self._check_open()
        return self._deployment.agreed_primaries(deadline_s)

    def run_on(self, node: RedisNode, action: Callable[[Exchange], ResultT], deadline_s: float) -> ResultT:
        """Runs `action` on this server and no other, until `deadline_s` on the monotonic clock.

        Raises what `action` raises, and RedisTroubleError.
        """
        self._check_open()
        try:
            with node.exchange(deadline_s) as exchange:
                return action(exchange)
        except RedisTroubleError as trouble:
            self._deployment.note_trouble(node, trouble)
            raise

    def max_memory_bytes(self, exchange: Exchange) -> int | None:
        """Returns the server's `maxmemory`, which is read once per connection.

        None: there is no limit, or the Redis user may not run INFO.
        """
        if exchange.socket not in self._max_memory:
            try:
                exchange.send(b"INFO", b"memory")
                self._max_memory[exchange.socket] = _parse_max_memory(exchange.read_bulk() or b"")
            except RedisReplyError:
                self._max_memory[exchange.socket] = None
        return self._max_memory[exchange.socket]

    def replies_by_reference(self, exchange: Exchange) -> bool:
        """Returns whether GET replies without a copy of the value (Valkey since 9). Read once per connection."""
        if exchange.socket not in self._by_reference:
            try:
                exchange.send(b"HELLO")
                self._by_reference[exchange.socket] = _is_valkey_since_9(exchange.read_fields())
            except RedisReplyError:
                self._by_reference[exchange.socket] = False
        return self._by_reference[exchange.socket]

    def close(self) -> None:
        """Closes idle connections now and busy ones when their exchange ends."""
        self._is_closed = True
        self._deployment.close()

    def _find_until_s(self, deadline_s: float) -> float:
        """Returns when to stop looking for a server: half of the budget is for connecting and the exchange."""
        return deadline_s - self._budget_s / 2

    def _node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        if self._is_closed:
            raise RedisTroubleError(MissReason.STORE_CLOSED)
        return self._deployment.node_of(name, until_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RedisTroubleError(MissReason.STORE_CLOSED)

    def _other_node(self, node: RedisNode, name: bytes | None, until_s: float) -> RedisNode | None:
        """Returns the key's server if that is not `node`; None when it is, or there is no time left to find it."""
        if time.monotonic() >= until_s:
            return None
        try:
            other = self._node_of(name, until_s)
        except RedisTroubleError:
            return None
        return None if other is node else other


def _parse_max_memory(info: bytes) -> int | None:
    for line in info.splitlines():
        name, _, value = line.partition(b":")
        if name == b"maxmemory":
            return _number(value) or None
    return None


def _is_valkey_since_9(fields: dict[bytes, bytes]) -> bool:
    major = _number(fields.get(b"version", b"").partition(b".")[0])
    return fields.get(b"server") == b"valkey" and major is not None and major >= 9


def _number(text: bytes) -> int | None:
    """Returns None for anything but a number of at most 20 digits. Python refuses to parse very long ones."""
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None
