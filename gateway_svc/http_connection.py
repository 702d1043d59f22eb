"""One HTTP connection: uvicorn's, with limits on slow and impolite clients, which uvicorn leaves to proxies."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway_svc.connection_limit import ConnectionLimit

# Time for the head of a request to arrive, and its largest size: clients that never finish one would pile up.
_HEAD_TIMEOUT_S = 30.0
_MAX_HEAD_BYTES = 64 << 10
# Time between two looks at the bytes that a client has not taken. If they are as many as before, it has stopped.
_STUCK_S = 60.0


class HttpConnection(HttpToolsProtocol):
    """A connection that ends if a head is slow or large, or if its client takes no byte of an answer for two minutes.

    A second request before the answer to the first one is not answered, and the connection is closed after the first
    answer: uvicorn would stop reading, and not notice that the client has gone. Headers after a body are dropped: they
    would pass for those before it (RFC 9110, section 6.5.1).
    """

    # The bound that all connections of one server share.
    _connections: ConnectionLimit
    _head_timer: asyncio.TimerHandle | None = None
    _stuck_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _num_waiting = 0
    _is_in_head = True
    _is_dropping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.opened(self, transport.get_extra_info("socket").fileno())
        self._await_head()
        self._stuck_timer = self.loop.call_later(_STUCK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        self._end_wait()
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
        super().connection_lost(exc)

    def end(self) -> None:
        """Ends the connection without an answer."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_dropping:
            return
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        if self._head_timer is not None:
            # The beginning of a body may come with the head.
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self.transport.close()
                return
            self._num_head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head and not self._is_dropping:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_dropping:
            return
        self._is_in_head = False
        self._end_wait()
        answered = self.cycle
        super().on_headers_complete()
        if answered is not None and not answered.response_complete:
            self._is_dropping = True
            self.pipeline.clear()
            self.cycle = answered
            answered.keep_alive = False
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if not self._is_dropping:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_dropping:
            # A request may have been answered before its body was there.
            if self.cycle is not None and not self.cycle.response_complete:
                self._connections.works(self)
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._connections.waits(self)
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Ends an idle connection, also if its client has not taken the last answer."""
        self.transport.abort()

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.close)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _look(self) -> None:
        num_waiting = self.transport.get_write_buffer_size()
        if num_waiting and num_waiting == self._num_waiting:
            self.transport.abort()
            return
        self._num_waiting = num_waiting
        self._stuck_timer = self.loop.call_later(_STUCK_S, self._look)


def http_connections(limit: ConnectionLimit) -> type[HttpConnection]:
    """Returns the class of which uvicorn makes a connection for each client of one server."""
    return type("HttpConnection", (HttpConnection,), {"_connections": limit})
