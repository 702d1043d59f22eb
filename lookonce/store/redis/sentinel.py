"""A primary that Sentinels watch and, when it fails, replace by one of its replicas.

The Sentinels are asked when the first operation comes and whenever trouble with the primary may mean that it is one no
more. A primary that was demoted and does not know it yet takes writes that are lost later: to a cache these are misses.
"""

from __future__ import annotations

from lookonce.store.redis.exchange import Nested
from lookonce.store.redis.lookup import DOUBTFUL_REASONS, Informants, Lookup
from lookonce.store.redis.miss_reason import MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.url import Address, RedisUrl, checked_address

# Host and port, in an array.
_MAX_VALUES = 3
_MAX_PORT_DIGITS = 5


class SentinelDeployment:
    """The current primary of one service. Thread-safe."""

    def __init__(self, url: RedisUrl, budget_s: float) -> None:
        """Raises ConfigurationError for options that cannot be used."""
        self._url = url
        self._budget_s = budget_s
        self._informants = Informants(url, budget_s)
        self._lookup = Lookup(self._look)
        self._node: RedisNode | None = None
        # The Sentinel that named the node.
        self._informant: Address | None = None

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        """The primary, whatever the key. Raises RedisTroubleError when no Sentinel knows one."""
        self._lookup.run(until_s)
        assert self._node is not None, "a first look that finds nothing raises"
        return self._node

    def nodes(self, until_s: float) -> list[RedisNode]:
        """Returns the primary that the Sentinels name now. Raises RedisTroubleError."""
        self._lookup.make_due(at_once=True)
        return [self.node_of(None, until_s)]

    def doubt(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        """Asks the Sentinels again, another one than last time if there is one."""
        if trouble.reason not in DOUBTFUL_REASONS:
            return False
        if node is self._node:
            self._lookup.make_due()
            if self._informant is not None:
                self._informants.distrust(self._informant)
        return True

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        """The primary is all there is."""
        return trouble.reason

    def close(self) -> None:
        """Closes the connections to the primary; those to Sentinels live for one question."""
        if self._node is not None:
            self._node.retire()

    def _look(self, until_s: float) -> None:
        address = self._informants.ask(self._ask, until_s)
        old = self._node
        if old is None or old.address != address:
            self._node = RedisNode(self._url.node_url, address, self._budget_s)
            if old is not None:
                old.retire()

    def _ask(self, sentinel: RedisNode, deadline_s: float) -> Address:
        with sentinel.exchange(deadline_s) as exchange:
            exchange.send(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._url.service.encode())
            address = _parse_address(exchange.read_nested(_MAX_VALUES))
        self._informant = sentinel.address
        return address


def _parse_address(reply: Nested) -> Address:
    if reply is None:
        # It watches no such service.
        raise RedisTroubleError(MissReason.CONNECT_FAILED)
    match reply:
        case [bytes(host), bytes(port)] if port.isdigit() and len(port) <= _MAX_PORT_DIGITS:
            try:
                return checked_address(host.decode(), int(port))
            except ValueError as error:
                raise RedisTroubleError(MissReason.PROTOCOL) from error
    raise RedisTroubleError(MissReason.PROTOCOL)
