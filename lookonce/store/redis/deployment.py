"""The interface that hides whether a URL names a single server, Sentinels or a cluster.

An operation requests the node of its key, talks to it, and reports any trouble. All methods may be called from many
threads. Only `node_of` and `nodes` wait for a server, and only until their deadline.
"""

from __future__ import annotations

from typing import Protocol

from lookonce.store.redis.cluster import ClusterDeployment
from lookonce.store.redis.miss_reason import MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.sentinel import SentinelDeployment
from lookonce.store.redis.url import Address, DeploymentKind, parse_redis_url


class Deployment(Protocol):
    """The servers behind one Redis URL. Thread-safe."""

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        """Returns the server that has the key `name`; None stands for a command that any server can answer.

        May look up the topology first, until `until_s` on the monotonic clock. Raises RedisTroubleError.
        """
        ...

    def nodes(self, until_s: float) -> list[RedisNode]:
        """Returns every primary, after a new lookup of the topology that ends at `until_s` on the monotonic clock.

        Raises RedisTroubleError.
        """
        ...

    def agreed_primaries(self, until_s: float) -> tuple[Address, ...]:
        """Returns the addresses of the primaries in use, if all who know the topology agree on them now.

        Empty where nothing but the servers themselves decides who is a primary. Raises RedisTroubleError, with reason
        MOVED while a failover is in progress.
        """
        ...

    def note_trouble(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        """Records trouble with a node. Returns whether `node_of` may name another one now."""
        ...

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        """Returns the reason for a miss of the whole cache that follows from trouble with one node."""
        ...

    def close(self) -> None:
        """Closes idle connections now and busy ones when they are given back."""
        ...


class SingleDeployment:
    """A single server, or a proxy that looks like one."""

    def __init__(self, url: str, budget_s: float) -> None:
        self._node = RedisNode(url, None, budget_s)

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        """Returns the single server, whatever the key."""
        return self._node

    def nodes(self, until_s: float) -> list[RedisNode]:
        """Returns a list of the single server."""
        return [self._node]

    def agreed_primaries(self, until_s: float) -> tuple[Address, ...]:
        """Returns nothing: no one else decides about a single server."""
        return ()

    def note_trouble(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        """Returns False always: a single server has no replacement."""
        return False

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        """Returns the reason itself: the server is the whole cache."""
        return trouble.reason

    def close(self) -> None:
        """Closes idle connections now and busy ones when they are given back."""
        self._node.retire()


def open_deployment(url: str, budget_s: float) -> Deployment:
    """Returns the deployment that `url` names, without connecting yet. Raises ConfigurationError.

    `budget_s`: longest time of one operation, seconds.
    """
    parsed = parse_redis_url(url)
    if parsed.kind is DeploymentKind.SENTINEL:
        return SentinelDeployment(parsed, budget_s)
    if parsed.kind is DeploymentKind.CLUSTER:
        return ClusterDeployment(parsed, budget_s)
    return SingleDeployment(parsed.node_url, budget_s)
