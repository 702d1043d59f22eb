"""A Redis Cluster: its nodes and the table of their slots.

The table is read (CLUSTER SLOTS) for the first operation, and again when trouble with a node suggests that it is out of
date. All keys of an image are in one slot, so an operation talks to one node, the slot's primary. Replicas serve none.

The loss of a node costs the images on it and no others. Each node has a circuit breaker of its own. As long as other
nodes answer, its failures do not count against the cache as a whole.
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
from lookonce.store.redis.lookup import STALE_TOPOLOGY_REASONS, Lookup, TopologySources
from lookonce.store.redis.miss_reason import UNREACHABLE_REASONS, MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.url import Address, RedisUrl, checked_address

_NUM_SLOTS: int = redis.crc.REDIS_CLUSTER_HASH_SLOTS
# A node that answered within this time is taken to be up.
_RECENT_S = 1.0
# Limit for the values in a table of slots. It is enough for one range per slot.
_MAX_VALUES = 1 << 20
_Ranges = dict[tuple[int, int], Address]


class NodeSkippedError(RedisTroubleError):
    """Raised in place of a request to a node whose breaker is open."""

    def __init__(self) -> None:
        super().__init__(MissReason.CLUSTER_DOWN)


class ClusterNode(RedisNode):
    """A node with a circuit breaker, so that a hung one does not cost each of its images the whole budget."""

    def __init__(self, url: str, address: Address, budget_s: float) -> None:
        super().__init__(url, address, budget_s)
        self._breaker = CircuitBreaker()
        # Time of the last answer, on the monotonic clock.
        self.answered_s = 0.0

    @contextlib.contextmanager
    def exchange(self, deadline_s: float) -> Iterator[Exchange]:
        """Yields an exchange as RedisNode does. Raises NodeSkippedError while the breaker is open."""
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
    """The cluster's primaries, by slot. Thread-safe."""

    def __init__(self, url: RedisUrl, budget_s: float) -> None:
        """Raises ConfigurationError for options that cannot be used."""
        self._url = url
        self._budget_s = budget_s
        self._sources = TopologySources(url, budget_s)
        self._lookup = Lookup(self._look)
        # Primary of each slot, None where the slot is unassigned. Replaced as a whole, so that readers need no lock.
        self._slots: list[ClusterNode | None] = [None] * _NUM_SLOTS
        self._nodes: dict[Address, ClusterNode] = {}
        self._turns = itertools.count()
        # The node that replied MOVED last. It certainly knows the new table, so it is asked first.
        self._redirecting: Address | None = None
        # The node that gave the current table.
        self._source: Address | None = None
        # Times of the last successful and the last failed lookup, on the monotonic clock.
        self._looked_up_s = 0.0
        self._lookup_failed_s = 0.0

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        """Returns the primary of the key's slot, or for None each primary in turn. Raises RedisTroubleError."""
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

    def agreed_primaries(self, until_s: float) -> tuple[Address, ...]:
        """Returns the addresses of all primaries that the cluster names now. Raises RedisTroubleError."""
        addresses = (node.address for node in self.nodes(until_s))
        return tuple(sorted(address for address in addresses if address is not None))

    def note_trouble(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        """Schedules a new read of the table: from this node if it replied MOVED, otherwise from another one first."""
        if isinstance(trouble, RedisMovedError):
            self._redirecting = node.address
            self._lookup.make_due(at_once=True)
            return True
        if trouble.reason not in STALE_TOPOLOGY_REASONS:
            return False
        if node.address is not None:
            self._sources.ask_last(node.address)
        self._lookup.make_due()
        return True

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        """Returns the reason for the cache as a whole, which counts as reachable while any other node answers."""
        is_skipped = isinstance(trouble, NodeSkippedError)
        if not is_skipped and trouble.reason not in UNREACHABLE_REASONS:
            return trouble.reason
        if not self._have_others_answered(node):
            return MissReason.CONNECT_FAILED if is_skipped else trouble.reason
        return MissReason.SLOW if trouble.reason is MissReason.TIMEOUT else MissReason.CLUSTER_DOWN

    def close(self) -> None:
        """Closes the connections to all nodes."""
        for node in list(self._nodes.values()):
            node.retire()

    def _have_others_answered(self, node: RedisNode) -> bool:
        answers_s = [other.answered_s for other in list(self._nodes.values()) if other is not node]
        if self._source != node.address:
            answers_s.append(self._looked_up_s)
        return max(answers_s, default=0.0) > max(self._lookup_failed_s, time.monotonic() - _RECENT_S)

    def _look(self, until_s: float) -> None:
        first, self._redirecting = self._redirecting, None
        try:
            ranges = self._sources.ask(self._ask, until_s, others=list(self._nodes), first=first)
        except RedisTroubleError:
            self._lookup_failed_s = time.monotonic()
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
        """Returns the address of the primary of each half-open range of slots. Raises RedisTroubleError."""
        assert node.address is not None, "topology sources are known by their address"
        with node.exchange(deadline_s) as exchange:
            exchange.send(b"CLUSTER", b"SLOTS")
            ranges = _parse_ranges(exchange.read_nested(_MAX_VALUES), node.address)
        if not ranges:
            # The node has not joined the cluster, or no slots are assigned yet.
            raise RedisTroubleError(MissReason.CLUSTER_DOWN)
        self._source, self._looked_up_s = node.address, time.monotonic()
        return ranges


def _parse_ranges(reply: Nested, asked: Address) -> _Ranges:
    """Parses the reply to CLUSTER SLOTS. Raises RedisTroubleError when it is no table of slots."""
    try:
        # A node that does not know its own address leaves it empty. It is the node that was asked.
        table = redis.cluster.parse_cluster_slots(reply, current_host=asked.host)
        ranges = {(start, last + 1): checked_address(*slots["primary"]) for (start, last), slots in table.items()}
        if any(not 0 <= start < stop <= _NUM_SLOTS for start, stop in ranges):
            raise ValueError("no such slots")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RedisTroubleError(MissReason.PROTOCOL) from error
    return ranges
