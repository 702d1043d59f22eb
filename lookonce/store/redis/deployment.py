"""Which server has a key: the small interface behind which single servers, Sentinels and clusters differ.

An operation asks for the node of its key, talks to it, and tells what trouble it had. All of that comes from many
threads; only `node_of` waits for anybody, and only for as long as it is told.
"""

from __future__ import annotations

from typing import Protocol

from lookonce.store.redis.cluster import ClusterDeployment
from lookonce.store.redis.miss_reason import MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.sentinel import SentinelDeployment
from lookonce.store.redis.url import DeploymentKind, parse_redis_url


class Deployment(Protocol):
    """Thread-safe. `name` is a key of Redis, None for whatever any node can answer."""

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        """The node to ask. Where that must be found out first, until `until_s` on the monotonic clock at most.

        Raises RedisTroubleError.
        """
        ...

    def nodes(self, until_s: float) -> list[RedisNode]:
        """Returns every server that holds keys of its own, after a fresh look, `until_s` at the latest.

        Raises RedisTroubleError.
        """
        ...

    def doubt(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        """Takes note of trouble with a node. Whether `node_of` may name another one now."""
        ...

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        """What trouble with one node means for the cache as a whole."""
        ...

    def close(self) -> None:
        """Closes idle connections now and busy ones when they are given back."""
        ...


class SingleDeployment:
    """One server, or something that looks like one."""

    def __init__(self, url: str, budget_s: float) -> None:
        self._node = RedisNode(url, None, budget_s)

    def node_of(self, name: bytes | None, until_s: float) -> RedisNode:
        """Always the same."""
        return self._node

    def nodes(self, until_s: float) -> list[RedisNode]:
        """Returns the one server."""
        return [self._node]

    def doubt(self, node: RedisNode, trouble: RedisTroubleError) -> bool:
        """There is no other."""
        return False

    def reason_of(self, node: RedisNode, trouble: RedisTroubleError) -> MissReason:
        """What it is."""
        return trouble.reason

    def close(self) -> None:
        """Closes the connections."""
        self._node.retire()


def open_deployment(url: str, budget_s: float) -> Deployment:
    """Connects to nothing yet. `budget_s`: longest time of one operation. Raises ConfigurationError."""
    parsed = parse_redis_url(url)
    if parsed.kind is DeploymentKind.SENTINEL:
        return SentinelDeployment(parsed, budget_s)
    if parsed.kind is DeploymentKind.CLUSTER:
        return ClusterDeployment(parsed, budget_s)
    return SingleDeployment(parsed.node_url, budget_s)
