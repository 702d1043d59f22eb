"""A primary under Sentinels, which replace it by one of its replicas when it fails.

The Sentinels are asked for the first operation, and again when trouble with the primary suggests that it was replaced.
A demoted primary that does not know it yet accepts writes that are lost later. For a cache these are misses.
"""

from __future__ import annotations

from lookonce.store.redis.exchange import Nested
from lookonce.store.redis.lookup import STALE_TOPOLOGY_REASONS, Lookup, TopologySources
from lookonce.store.redis.miss_reason import MissReason, RedisReplyError, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.url import Address, RedisUrl, checked_address

# The array, host and port.
_MAX_VALUES = 3
_MAX_PORT_DIGITS = 5
# Names and values of a primary's state; Redis 7.2 has 40, later ones may have more.
_MAX_STATE_VALUES = 1024
_FAILOVER_FLAG = b"failover_in_progress"


class SentinelDeployment:
    """The current primary of one service. Thread-safe."""

    def __init__(self, url: RedisUrl, budget_s: float) -> None:
        """Raises ConfigurationError for options that cannot be used."""
        self._url = url
        self._budget_s = budget_s
        self._sources = TopologySources(url, budget_s)
        self._lookup = Lookup(self._look)
        self._node: RedisNode | None = None
        # The Sentinel that named the current primary.
        self._source: Address | None = None

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        """Returns the primary, whatever the key. Raises RedisTroubleError when no Sentinel knows one."""
        self._lookup.run(until_s)
        assert self._node is not None, "a first lookup that finds nothing raises"
        return self._node

    def nodes(self, until_s: float) -> list[RedisNode]:
        """Returns the primary that the Sentinels name now. Raises RedisTroubleError."""
        self._lookup.make_due(at_once=True)
        return [self.node_of(None, until_s)]

    def agreed_primaries(self, until_s: float) -> tuple[Address, ...]:
        """Returns the address of the primary in use, if every Sentinel that answers names it and none is replacing it.

        A replaced primary accepts commands for seconds, until a Sentinel demotes it, and the Sentinels learn of the new
        one at different times. Raises RedisTroubleError, with reason MOVED while they replace it or disagree.
        """
        named = set(self._sources.ask_each(self._ask_settled, until_s))
        if len(named) > 1 or None in named:
            self._lookup.make_due(at_once=True)
            raise RedisTroubleError(MissReason.MOVED)
        (address,) = named
        if self._node is None or self._node.address != address:
            self._lookup.make_due(at_once=True)
        if self.node_of(None, until_s).address != address:
            raise RedisTroubleError(MissReason.MOVED)
        assert address is not None, "checked above"
        return (address,)

    def note_trouble(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        """Schedules a new question to the Sentinels, to another one than last time if there is one."""
        if trouble.reason not in STALE_TOPOLOGY_REASONS:
            return False
        if node is self._node:
            self._lookup.make_due()
            if self._source is not None:
                self._sources.ask_last(self._source)
        return True

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        """Returns the reason itself: the primary is the whole cache."""
        return trouble.reason

    def close(self) -> None:
        """Closes the connections to the primary. Connections to Sentinels end with each question."""
        if self._node is not None:
            self._node.retire()

    def _look(self, until_s: float) -> None:
        address = self._sources.ask(self._ask, until_s)
        old = self._node
        if old is None or old.address != address:
            self._node = RedisNode(self._url.node_url, address, self._budget_s)
            if old is not None:
                old.retire()

    def _ask(self, sentinel: RedisNode, deadline_s: float) -> Address:
        with sentinel.exchange(deadline_s) as exchange:
            exchange.send(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._url.service.encode())
            address = _parse_address(exchange.read_nested(_MAX_VALUES))
        self._source = sentinel.address
        return address

    def _ask_settled(self, sentinel: RedisNode, deadline_s: float) -> Address | None:
        """Returns the primary that this Sentinel names; None if it is replacing it just now."""
        service = self._url.service.encode()
        with sentinel.exchange(deadline_s) as exchange:
            exchange.send(b"SENTINEL", b"MASTER", service)
            exchange.send(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service)
            try:
                state = exchange.read_nested(_MAX_STATE_VALUES)
            except RedisReplyError:
                # Without the right to see the state, the name alone must do.
                state = None
            address = _parse_address(exchange.read_nested(_MAX_VALUES))
        return None if _FAILOVER_FLAG in _flags_of(state) else address


def _flags_of(state: Nested) -> list[bytes]:
    """Returns the flags in the reply to SENTINEL MASTER, which lists names and values in turn."""
    fields = state if isinstance(state, list) else []
    for name, value in zip(fields[::2], fields[1::2], strict=False):
        if name == b"flags" and isinstance(value, bytes):
            return value.split(b",")
    return []


def _parse_address(reply: Nested) -> Address:
    if reply is None:
        # The Sentinel watches no such service.
        raise RedisTroubleError(MissReason.CONNECT_FAILED)
    match reply:
        case [bytes(host), bytes(port)] if port.isdigit() and len(port) <= _MAX_PORT_DIGITS:
            try:
                return checked_address(host.decode(), int(port))
            except ValueError as error:
                raise RedisTroubleError(MissReason.PROTOCOL) from error
    raise RedisTroubleError(MissReason.PROTOCOL)
