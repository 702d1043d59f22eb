"""A Redis Cluster: the table of which node has which slot, and the nodes.

The table is read (CLUSTER SLOTS) when the first operation comes and whenever trouble with a node may mean that it is
out of date. The whole image is in one slot, so an operation talks to one node, its primary; replicas are never asked.

A node that is away takes its images with it and nothing else: each node has a breaker of its own, and as long as others
answer its trouble is none of the cache as a whole.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import redis.cluster
import redis.crc

from lookonce.store.redis.circuit_breaker import CircuitBreaker
from lookonce.store.redis.exchange import Exchange, Nested, RedisMovedError
from lookonce.store.redis.lookup import DOUBTFUL_REASONS, Informants, Lookup
from lookonce.store.redis.miss_reason import UNREACHABLE_REASONS, MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.url import Address, RedisUrl, checked_address

_NUM_SLOTS: int = redis.crc.REDIS_CLUSTER_HASH_SLOTS
# Whoever answered so recently is taken to be there.
_RECENT_S = 1.0
# Of a cluster in which every slot has been moved alone.
_MAX_VALUES = 1 << 20
_Ranges = dict[tuple[int, int], Address]


class NodeSkippedError(RedisTroubleError):
    """The node was not asked, since it has not answered for some time."""

    def __init__(self) -> None:
        super().__init__(MissReason.CLUSTER_DOWN)


class ClusterNode(RedisNode):
    """A node with a breaker, so that one that hangs does not cost every one of its images the whole budget."""

    def __init__(self, url: str, address: Address, budget_s: float) -> None:
        super().__init__(url, address, budget_s)
        self._breaker = CircuitBreaker()
        # When an exchange ended as it should, on the monotonic clock.
        self.answered_s = 0.0

    @contextlib.contextmanager
    def exchange(self, deadline_s: float) -> Iterator[Exchange]:
        """Raises NodeSkippedError while the breaker is open."""
        permit = self._breaker.acquire()
        if permit is None:
            raise NodeSkippedError
        was_reached = True
        try:
            with super().exchange(deadline_s) as exchange:
                yield exchange
        except RedisTroubleError as trouble:
            was_reached = trouble.reason not in UNREACHABLE_REASONS
            raise
        finally:
            if was_reached:
                self.answered_s = time.monotonic()
            self._breaker.report(permit, was_reached)


class ClusterDeployment:
    """Slots and the primaries that have them. Thread-safe."""

    def __init__(self, url: RedisUrl, budget_s: float) -> None:
        """Raises ConfigurationError for options that cannot be used."""
        self._url = url
        self._budget_s = budget_s
        self._informants = Informants(url, budget_s)
        self._lookup = Lookup(self._look)
        # Replaced as a whole, so that readers need no lock. By slot; None: nobody has it.
        self._slots: list[ClusterNode | None] = [None] * _NUM_SLOTS
        self._nodes: dict[Address, ClusterNode] = {}
        self._turns = itertools.count()
        # Who is asked first since it certainly knows something new.
        self._mover: Address | None = None
        # Who told the table, and when on the monotonic clock; and when nobody would.
        self._informant: Address | None = None
        self._informed_s = 0.0
        self._uninformed_s = 0.0

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        """The primary of the slot; for None each primary in turn. Raises RedisTroubleError."""
        self._lookup.run(until_s)
        if name is None:
            nodes = list(self._nodes.values())
            return nodes[next(self._turns) % len(nodes)]
        slot: int = redis.crc.key_slot(name)
        node = self._slots[slot]
        if node is None:
            self._lookup.make_due()
            raise RedisTroubleError(MissReason.CLUSTER_DOWN)
        return node

    def nodes(self, until_s: float) -> list[RedisNode]:
        """Returns all primaries that the cluster names now. Raises RedisTroubleError."""
        self._lookup.make_due(at_once=True)
        self._lookup.run(until_s)
        return list(self._nodes.values())

    def doubt(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        """Reads the table again, from another node, or from this one if it knows who has the key."""
        if isinstance(trouble, RedisMovedError):
            self._mover = node.address
            self._lookup.make_due(at_once=True)
            return True
        if trouble.reason not in DOUBTFUL_REASONS:
            return False
        if node.address is not None:
            self._informants.distrust(node.address)
        self._lookup.make_due()
        return True

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        """A node that cannot be reached while others can is an answer of the cluster: not now."""
        is_skipped = isinstance(trouble, NodeSkippedError)
        if not is_skipped and trouble.reason not in UNREACHABLE_REASONS:
            return trouble.reason
        if not self._has_answered_beside(node):
            return MissReason.CONNECT_FAILED if is_skipped else trouble.reason
        return MissReason.SLOW if trouble.reason is MissReason.TIMEOUT else MissReason.CLUSTER_DOWN

    def close(self) -> None:
        """Closes the connections to all nodes."""
        for node in list(self._nodes.values()):
            node.retire()

    def _has_answered_beside(self, node: RedisNode) -> bool:
        answers_s = [other.answered_s for other in list(self._nodes.values()) if other is not node]
        if self._informant != node.address:
            answers_s.append(self._informed_s)
        return max(answers_s, default=0.0) > max(self._uninformed_s, time.monotonic() - _RECENT_S)

    def _look(self, until_s: float) -> None:
        first, self._mover = self._mover, None
        try:
            ranges = self._informants.ask(self._ask, until_s, others=list(self._nodes), first=first)
        except RedisTroubleError:
            self._uninformed_s = time.monotonic()
            raise
        nodes = {
            address: self._nodes.get(address) or ClusterNode(self._url.node_url, address, self._budget_s)
            for address in set(ranges.values())
        }
        slots: list[ClusterNode | None] = [None] * _NUM_SLOTS
        for (start, stop), address in ranges.items():
            slots[start:stop] = [nodes[address]] * (stop - start)
        old, self._slots, self._nodes = self._nodes, slots, nodes
        for address, node in old.items():
            if address not in nodes:
                node.retire()

    def _ask(self, node: RedisNode, deadline_s: float) -> _Ranges:
        """By half-open range of slots, the address of the primary."""
        assert node.address is not None, "whoever is asked was found by its address"
        with node.exchange(deadline_s) as exchange:
            exchange.send(b"CLUSTER", b"SLOTS")
            ranges = _parse_ranges(exchange.read_nested(_MAX_VALUES), node.address)
        if not ranges:
            # It has not joined the others, or nobody has given out the slots.
            raise RedisTroubleError(MissReason.CLUSTER_DOWN)
        self._informant, self._informed_s = node.address, time.monotonic()
        return ranges


def _parse_ranges(reply: Nested, asked: Address) -> _Ranges:
    """Raises RedisTroubleError for what is no table of slots."""
    try:
        # A node that knows no name of its own says none: then it is the one that was asked.
        table = redis.cluster.parse_cluster_slots(reply, current_host=asked.host)
        ranges = {(start, last + 1): checked_address(*slots["primary"]) for (start, last), slots in table.items()}
        if any(not 0 <= start < stop <= _NUM_SLOTS for start, stop in ranges):
            raise ValueError("no such slots")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RedisTroubleError(MissReason.PROTOCOL) from error
    return ranges
