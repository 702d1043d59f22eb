"""A TCP proxy that counts the bytes that clients send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from tests.lookonce.server.running_server import CHANNEL_OPTIONS


class CountingProxy:
    """Passes connections on in threads of its own."""

    def __init__(self, listener: socket.socket, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._listener = listener
        self._target = (host, int(port))
        self._sockets: list[socket.socket] = []
        self.num_bytes = 0

    def stop(self) -> None:
        """Ends `accept` and all connections. gRPC keeps those of a closed channel while a call is referred to."""
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept(self) -> None:
        """Passes on every connection until `stop`."""
        threads: list[threading.Thread] = []
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                pair = [
                    threading.Thread(target=self._copy, args=(client, server, True)),
                    threading.Thread(target=self._copy, args=(server, client, False)),
                ]
                for thread in pair:
                    thread.start()
                threads += pair
        for thread in threads:
            thread.join()

    def _copy(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(1 << 16):
                self.num_bytes += len(data) if counts else 0
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@contextlib.asynccontextmanager
async def counting_proxy(target: str) -> AsyncIterator[tuple[CountingProxy, grpc.aio.Channel]]:
    """Yields a proxy before `target`, and a channel through it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = CountingProxy(listener, target)
        thread = threading.Thread(target=proxy.accept)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                yield proxy, channel
        finally:
            proxy.stop()
            await asyncio.to_thread(thread.join)
