"""A lasting connection for subscriptions, by redis-py's asyncio client, for every kind of deployment.

A cluster delivers a published message on all of its nodes, and a primary on its replicas, too. So a subscription may be
on any node of a cluster, and under Sentinels it is on the primary.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
import redis.exceptions

from lookonce.logs import get_logger
from lookonce.store.redis.deployment import open_deployment
from lookonce.store.redis.miss_reason import MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode

_RECONNECT_S = 1.0
_CANCEL_AGAIN_S = 0.05

_log = get_logger(__name__)


class RedisSubscriber:
    """A connection that a task on the event loop keeps open. Trouble with Redis only delays messages; nothing raises.

    Raises ConfigurationError for an unusable URL.
    """

    def __init__(self, url: str, budget_s: float, purpose: str) -> None:
        """`budget_s`: longest time for finding the node, for connecting and for closing, seconds, each.

        `purpose` names the connection in log lines.
        """
        self._deployment = open_deployment(url, budget_s)
        self._budget_s = budget_s
        self._node: RedisNode | None = None
        self._purpose = purpose
        self._client: Any = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(
        self, listen: Callable[[Any], Awaitable[None]], lost: Callable[[], None], name: bytes | None = None
    ) -> None:
        """Connects and calls `listen` with the client, again after each loss, until `close`. Call on the event loop.

        `listen` returns or raises when the connection is lost; then `lost` is called. If `name` is given, the
        connection is to the node that has this key.
        """
        self._keeper = asyncio.get_running_loop().create_task(self._keep(listen, lost, name))

    async def close(self) -> None:
        """Closes the connection and stops reconnecting."""
        self._is_closed = True
        if self._keeper is not None:
            # Bounded, so that a dead server does not delay the end of the process.
            until_s = time.monotonic() + self._budget_s
            while not self._keeper.done() and time.monotonic() < until_s:
                # More than once: a TimeoutError of redis-py may replace the cancellation.
                self._keeper.cancel()
                await asyncio.wait({self._keeper}, timeout=_CANCEL_AGAIN_S)
        await self._disconnect()

    async def _keep(
        self, listen: Callable[[Any], Awaitable[None]], lost: Callable[[], None], name: bytes | None
    ) -> None:
        while not self._is_closed:
            try:
                await listen(await self._connect(name))
            except (RedisTroubleError, redis.exceptions.RedisError, OSError, TimeoutError) as error:
                _log.debug(f"the connection for {self._purpose} was lost", reason=type(error).__name__)
            except Exception:
                # The task goes on after a bug in `listen`, since nobody would start it again.
                _log.exception(f"the connection for {self._purpose} failed")
            lost()
            if not self._is_closed:
                await asyncio.sleep(_RECONNECT_S)

    async def _connect(self, name: bytes | None) -> Any:
        """Returns a client of a node that answers. Its reads have no timeout.

        A second call means that the connection was lost, so the node is looked up again. Raises RedisTroubleError,
        redis-py's exceptions, OSError and TimeoutError.
        """
        await self._disconnect()
        if self._node is not None:
            self._deployment.note_trouble(self._node, RedisTroubleError(MissReason.CLOSED))
        # In a thread, as it may ask Sentinels or nodes of a cluster.
        node = await asyncio.to_thread(self._deployment.node_of, name, time.monotonic() + self._budget_s)
        place = {} if node.address is None else {"host": node.address.host, "port": node.address.port}
        options: dict[str, Any] = {**place, "protocol": 2, "socket_connect_timeout": self._budget_s, "retry": None}
        self._node, self._client = node, redis.asyncio.Redis.from_url(node.url, **options)
        async with asyncio.timeout(2 * self._budget_s):
            # SUBSCRIBE alone would not reveal a server that does not answer.
            await self._client.ping()
        return self._client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._budget_s):
                    await client.aclose()
