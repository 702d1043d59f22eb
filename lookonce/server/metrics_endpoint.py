"""The HTTP endpoint that Prometheus scrapes: one thread, however many connections are open, and each for a short time.

The endpoint of prometheus_client has a thread for each connection and waits for its request forever: 300 silent
connections were 300 threads. Here the oldest connection ends when there are too many, so a scrape is always answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, make_wsgi_app

from lookonce.logs import get_logger

# Connections open at the same time. Scrapers need a handful.
_MAX_CONNECTIONS = 128
# Time for a request to arrive, and for its answer to be read, seconds.
_REQUEST_S = 5.0
_ANSWER_S = 10.0
_MAX_REQUEST_BYTES = 16384
_TEXT = ("Content-Type", "text/plain; charset=utf-8")

_log = get_logger(__name__)

Application: TypeAlias = Callable[[dict[str, Any], Callable[[str, list[tuple[str, str]]], None]], Iterable[bytes]]
"""A WSGI application, as far as prometheus_client's needs it."""


class MetricsEndpoint:
    """Serves one registry on an address, in a daemon thread, from its creation until `stop`."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Port 0 takes a free one. Raises OSError when the address cannot be taken."""
        self._application: Application = make_wsgi_app(registry)
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        # Open connections, oldest first.
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes the address and all connections, and joins the thread."""
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    # The endpoint's thread only.

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._answer, sock=self._socket, limit=_MAX_REQUEST_BYTES, backlog=_MAX_CONNECTIONS
        )
        await self._is_over.wait()
        server.close()
        for writer in self._open:
            writer.transport.abort()
        # Each connection's task sees its end.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request and closes the connection."""
        self._open[writer] = None
        if len(self._open) > _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            # A client that sends nothing, too much or too slowly, or leaves, gets no answer.
            with contextlib.suppress(TimeoutError, EOFError, OSError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_S):
                    request = await reader.readuntil(b"\r\n\r\n")
                async with asyncio.timeout(_ANSWER_S):
                    writer.write(self._response(request))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _response(self, request: bytes) -> bytes:
        began: list[tuple[str, list[tuple[str, str]]]] = []

        def start_response(status: str, headers: list[tuple[str, str]]) -> None:
            began.append((status, headers))

        environment = _environment(request)
        if environment is None:
            return _http("400 Bad Request", [_TEXT], b"this is no HTTP request\n")
        try:
            body = b"".join(self._application(environment, start_response))
        except Exception:
            _log.exception("a scrape failed")
            return _http("500 Internal Server Error", [_TEXT], b"the log has the error\n")
        ((status, headers),) = began
        return _http(status, headers, body)


def _listening(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_MAX_CONNECTIONS)
    except OSError:
        listening.close()
        raise
    return listening


def _environment(request: bytes) -> dict[str, Any] | None:
    """Returns the WSGI environment of a request, None if it is none."""
    first, *lines = request.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    path, _, query = words[1].partition("?")
    environment: dict[str, Any] = {"REQUEST_METHOD": words[0], "PATH_INFO": path, "QUERY_STRING": query}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            environment[f"HTTP_{name.strip().upper().replace('-', '_')}"] = value.strip()
    return environment


def _http(status: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    everything = [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in everything), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
