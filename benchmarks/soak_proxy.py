"""A TCP proxy before one server, whose connections can all be cut at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_PIECE_BYTES = 1 << 16


class CuttingProxy:
    """Passes connections on, on the running event loop."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Resets all connections, on both sides; new ones are accepted at once."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one connection on until either side ends it."""
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, server_writer}
        self._writers |= pair
        try:
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def cutting_proxy(target: str) -> AsyncIterator[tuple[CuttingProxy, str]]:
    """Yields a proxy before `target`, and the proxy's address."""
    proxy = CuttingProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    try:
        yield proxy, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        proxy.cut()
