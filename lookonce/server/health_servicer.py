"""The standard health service of gRPC (grpc.health.v1). Event loop only, no locks.

The servicer of grpcio-health-checking holds a lock while it writes to a watch. A client that took no byte of its answer
thus stopped all other watches, the readiness and the drain. Here only a watch itself waits for its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health is untyped here
    """Tells whether the server and its services accept calls. The empty name is the server."""

    def __init__(self) -> None:
        self._is_draining = False
        self._statuses: dict[str, Any] = {}
        # For each name that is watched an event per watch, which is set when the name's status has changed.
        self._watches: dict[str, set[asyncio.Event]] = {}

    def set(self, name: str, *, is_serving: bool) -> None:
        """Sets the status of a name. Has no effect after `begin_drain`."""
        if not self._is_draining:
            self._set(name, _Response.SERVING if is_serving else _Response.NOT_SERVING)

    def begin_drain(self) -> None:
        """Sets the status of all names to NOT_SERVING for good."""
        self._is_draining = True
        for name in self._statuses:
            self._set(name, _Response.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:
        """Answers with the status of a name, or NOT_FOUND if there is no such name."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Response(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        """Yields the status of a name, SERVICE_UNKNOWN if there is no such name, and then each change.

        A client that reads slowly misses statuses between the last one that it has read and the current one.
        """
        name, changed, last_status = request.service, asyncio.Event(), None
        self._watches.setdefault(name, set()).add(changed)
        try:
            while True:
                changed.clear()
                status = self._statuses.get(name, _Response.SERVICE_UNKNOWN)
                if status != last_status:
                    last_status = status
                    yield _Response(status=status)
                await changed.wait()
        finally:
            self._watches[name].discard(changed)
            if not self._watches[name]:
                del self._watches[name]

    def _set(self, name: str, status: Any) -> None:
        self._statuses[name] = status
        for changed in self._watches.get(name, ()):
            changed.set()
