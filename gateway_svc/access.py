"""Gives every HTTP request an id, a line in the log and a place in the metrics, whatever it asks for."""

from __future__ import annotations

import time
import uuid

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookonce.identity import REQUEST_ID
from lookonce.logs import get_logger

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# Paths that probes and open playgrounds ask for again and again.
_QUIET = frozenset({"/health", "/playground/load"})

_log = get_logger(__name__)


class AccessMetrics:
    """Counts and times of requests, by path and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("path", "status")
        self.requests = Counter("lookonce_gateway_requests", "Requests that have ended.", labels, registry=registry)
        self.duration = Histogram(
            "lookonce_gateway_request_duration_seconds",
            "Time from the head of a request to the end of its answer.",
            ("path",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.in_flight = Gauge("lookonce_gateway_requests_in_flight", "Requests in progress.", registry=registry)


class Access:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, metrics: AccessMetrics, paths: frozenset[str]) -> None:
        """`paths` are those that metrics name; all others, which callers choose, count as `other`."""
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request and notes how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 499

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        begin_s = time.monotonic()
        self._metrics.in_flight.inc()
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.in_flight.dec()
            self._note(scope, status, time.monotonic() - begin_s)

    def _note(self, scope: Scope, status: int, duration_s: float) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.duration.labels(path).observe(duration_s)
        write = _log.debug if path in _QUIET else _log.info
        write("request", path=path, status=status, duration_s=round(duration_s, 6))


def _request_id(scope: Scope) -> str:
    """Returns the caller's id if it has the form of one, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            offered = value.decode("latin-1")
            return offered if REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex
    return uuid.uuid4().hex
