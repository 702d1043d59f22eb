"""The HTTP server: its address, limits on slow clients, readiness and drain.

SIGTERM or SIGINT → /health says 503 → `drain_delay_s` → no new connections and calls → calls in progress finish, for at
most `drain_timeout_s` → exit 0. A second signal kills the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pathlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from gateway_svc.connection_limit import ConnectionLimit, LimitedListener, allowed_connections
from gateway_svc.endpoints import Endpoints
from gateway_svc.http_connection import http_connections
from gateway_svc.settings import GatewaySettings
from lookonce.errors import ConfigurationError
from lookonce.logs import get_logger

# Idle time after which a connection is closed. Above the 60 s of common load balancers, which must close first.
_KEEP_ALIVE_S = 75
# Connections that the event loop accepts before it does other work. Where the process has no file left, asyncio writes
# as many lines into the log, each second.
_ACCEPTED_AT_ONCE = 128
# Time for the last answers to reach their clients, seconds.
_LAST_ANSWERS_S = 1.0

_log = get_logger(__name__)


class _Server(uvicorn.Server):
    """uvicorn's server without its handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_until_stopped(
    settings: GatewaySettings, app: ASGIApp, endpoints: Endpoints, metrics_port: int | None
) -> None:
    """Serves until SIGTERM or SIGINT, drains, and returns. Raises ConfigurationError if the address cannot be taken."""
    limit = ConnectionLimit(allowed_connections(has_tls=settings.tls_cert is not None))
    listening = _listening(settings.listen, limit)
    config = uvicorn.Config(
        app,
        http=http_connections(limit),
        backlog=_ACCEPTED_AT_ONCE,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        # Calls end a little before, with an answer.
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + _LAST_ANSWERS_S),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    try:
        config.load()
    except OSError as error:
        listening.close()
        raise ConfigurationError(f"--tls-cert, --tls-key: cannot be used: {error.strerror or error}") from None
    server = _Server(config)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await _announced(settings, server, serving, listening, metrics_port)
        await asyncio.wait({serving, asyncio.ensure_future(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, _killed)
        _log.info("draining", calls=len(server.server_state.tasks))
        endpoints.is_draining = True
        _remove(settings.ready_file)
        await asyncio.sleep(settings.drain_delay_s)
        loop.call_later(settings.drain_timeout_s, endpoints.end_calls)
    finally:
        server.should_exit = True
        await serving
    _log.info("stopped")


async def _announced(
    settings: GatewaySettings,
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    listening: socket.socket,
    metrics_port: int | None,
) -> None:
    while not server.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    host = settings.listen.rpartition(":")[0]
    target = f"{host}:{listening.getsockname()[1]}"
    _log.info("listening", target=target, metrics_port=metrics_port)
    if settings.ready_file is not None:
        text = json.dumps({"target": target, "metrics_port": metrics_port, "pid": os.getpid()})
        temporary = settings.ready_file.with_name(settings.ready_file.name + ".new")
        temporary.write_text(text)
        temporary.replace(settings.ready_file)


def _listening(address: str, limit: ConnectionLimit) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = LimitedListener(family, limit)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
        listening.listen()
        return listening
    except OSError as error:
        listening.close()
        raise ConfigurationError(f"--listen: cannot listen on {address}: {error.strerror or error}") from None


def _remove(path: pathlib.Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


def _killed(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
