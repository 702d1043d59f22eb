"""redis-py's asyncio client of a node at which one hears what is published, whatever the deployment.

For connections that last. What is published on one node of a cluster is heard on all of them, what is published on a
primary also on its replicas; so any node of a cluster will do, and of Sentinels the primary.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import redis.asyncio
import redis.exceptions

from lookonce.miss_reason import MissReason, RedisTroubleError
from lookonce.redis_deployment import open_deployment
from lookonce.redis_node import RedisNode


class RedisSubscriber:
    """One client at a time. Owned by a task on the event loop. Raises ConfigurationError for an unusable URL."""

    def __init__(self, url: str, budget_s: float) -> None:
        """`budget_s`: longest time of finding the node, and of connecting to it, seconds."""
        self._deployment = open_deployment(url, budget_s)
        self._budget_s = budget_s
        self._node: RedisNode | None = None
        self._client: Any = None

    async def connect(self, name: bytes | None = None) -> Any:
        """A client of a node that answers, for as long as `connect` is not called again. `name`: a key that it has.

        Whoever calls this again has lost the connection: another node may be the one by now. Reads on the client wait
        for as long as nothing happens. Raises RedisTroubleError, redis-py's exceptions, OSError and TimeoutError.
        """
        await self.close()
        if self._node is not None:
            self._deployment.doubt(self._node, RedisTroubleError(MissReason.CLOSED))
        # In a thread since Sentinels or nodes may have to be asked.
        node = await asyncio.to_thread(self._deployment.node_of, name, time.monotonic() + self._budget_s)
        place = {} if node.address is None else {"host": node.address.host, "port": node.address.port}
        options: dict[str, Any] = {**place, "protocol": 2, "socket_connect_timeout": self._budget_s, "retry": None}
        self._node, self._client = node, redis.asyncio.Redis.from_url(node.url, **options)
        async with asyncio.timeout(2 * self._budget_s):
            # A subscription would not notice that nobody is there.
            await self._client.ping()
        return self._client

    async def close(self) -> None:
        """Ends the connections."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._budget_s):
                    await client.aclose()
