"""redis-py's asyncio client of a node at which one hears what is published, whatever the deployment.

For connections that last. What is published on one node of a cluster is heard on all of them, what is published on a
primary also on its replicas; so any node of a cluster will do, and of Sentinels the primary.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
import redis.exceptions
import structlog

from lookonce.store.redis.deployment import open_deployment
from lookonce.store.redis.miss_reason import MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode

_RECONNECT_S = 1.0

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class RedisSubscriber:
    """One client at a time, kept by a task on the event loop; trouble with Redis is silence, never an exception.

    Raises ConfigurationError for an unusable URL.
    """

    def __init__(self, url: str, budget_s: float, what: str) -> None:
        """`budget_s`: longest time of finding the node, of connecting and of ending, seconds. `what`: for logs."""
        self._deployment = open_deployment(url, budget_s)
        self._budget_s = budget_s
        self._node: RedisNode | None = None
        self._what = what
        self._client: Any = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(
        self, listen: Callable[[Any], Awaitable[None]], lost: Callable[[], None], name: bytes | None = None
    ) -> None:
        """Calls `listen` with a client that has just connected, again and again until `close`; on the event loop.

        `listen` returns or raises when it has lost the connection, and `lost` is called then. `name`: a key that the
        node must have.
        """
        self._keeper = asyncio.get_running_loop().create_task(self._keep(listen, lost, name))

    async def close(self) -> None:
        """Ends the connection."""
        # Cancelling alone is not enough: where redis-py closes a connection on the way, its TimeoutError may take the
        # place of the cancellation.
        self._is_closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            # Bounded, like all that a process waits for while it ends.
            await asyncio.wait({self._keeper}, timeout=self._budget_s)
        await self._disconnect()

    async def _keep(
        self, listen: Callable[[Any], Awaitable[None]], lost: Callable[[], None], name: bytes | None
    ) -> None:
        while not self._is_closed:
            try:
                await listen(await self._connect(name))
            except (RedisTroubleError, redis.exceptions.RedisError, OSError, TimeoutError) as error:
                _log.debug(f"{self._what} is away", reason=type(error).__name__)
            except Exception:
                # Nothing but waiting depends on this task, so it must not end either.
                _log.exception(f"{self._what} failed")
            lost()
            if not self._is_closed:
                await asyncio.sleep(_RECONNECT_S)

    async def _connect(self, name: bytes | None) -> Any:
        """A client of a node that answers. Reads on it wait for as long as nothing happens.

        Whoever calls this again has lost the connection: another node may be the one by now. Raises RedisTroubleError,
        redis-py's exceptions, OSError and TimeoutError.
        """
        await self._disconnect()
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

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._budget_s):
                    await client.aclose()
