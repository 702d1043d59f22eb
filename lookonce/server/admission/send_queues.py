"""Bytes of answers that this host's kernel holds for clients: gRPC has written them, and the client's host lacks them.

gRPC takes an answer for sent when the kernel has it, and in a drain closes a connection after its last answer. What a
client sends afterwards, such as an update of its flow control window, makes the kernel reset the connection and drop
the rest of the answer. Clients on slow links, and those that pause for a second, lost the ends of their answers so. A
drain therefore looks at the kernel's queues before it lets gRPC close a connection.

Linux only, which lists the queues in files. Elsewhere all queues look empty. A reset drops nothing that a client's host
has received, and nothing on Unix sockets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import pathlib
import struct
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TypeAlias

# One line for each TCP connection of this network namespace, after one line of titles.
_TABLES = tuple(pathlib.Path("/proc/self/net") / name for name in ("tcp", "tcp6"))
# Time between two looks. Clients' hosts acknowledge what they received after up to 40 ms.
_LOOK_S = 0.02

# Host and port, the host as `ipaddress` writes it.
Address: TypeAlias = tuple[str, int]


class SendQueues:
    """The queues of all connections to some ports of this host. Use it from one event loop."""

    def __init__(self) -> None:
        self._ports: set[int] = set()
        # Bytes by client, for queues that are not empty, and the time of that look.
        self._num_bytes: dict[Address, int] = {}
        self._looked_s = -_LOOK_S
        self._lock = asyncio.Lock()

    def add_port(self, port: int) -> None:
        """Adds the connections to a port that this process listens at."""
        self._ports.add(port)

    async def emptied(self, peer: str, moved: Callable[[], None]) -> None:
        """Waits until the client's host has received all that was written to it before the call.

        `peer` is what gRPC calls the client, such as "ipv4:127.0.0.1:50000". `moved` is called at the start and
        whenever the queue has become shorter.
        """
        address = parse_peer(peer)
        if address is None:
            return
        await self._until_empty(lambda queues: queues.get(address, 0), moved)

    async def all_emptied(self, moved: Callable[[], None]) -> None:
        """Waits as `emptied` for all clients together."""
        await self._until_empty(lambda queues: sum(queues.values()), moved)

    async def hold_any(self) -> bool:
        """Returns whether a client's host lacks a part of what was written to it."""
        return bool(await self._look())

    async def _until_empty(self, count: Callable[[dict[Address, int]], int], moved: Callable[[], None]) -> None:
        moved()
        num_before = count(await self._look())
        while num_before:
            await asyncio.sleep(_LOOK_S)
            num_bytes = count(await self._look())
            if num_bytes < num_before:
                moved()
            num_before = num_bytes

    async def _look(self) -> dict[Address, int]:
        """Returns the queues as they were after the call. Calls at the same time share one look."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with self._lock:
            if self._looked_s < asked_s:
                begun_s = loop.time()
                # Some hosts have tens of thousands of connections.
                self._num_bytes = await asyncio.to_thread(self._read)
                self._looked_s = begun_s
            return self._num_bytes

    def _read(self) -> dict[Address, int]:
        queues: dict[Address, int] = {}
        for table in _TABLES:
            for port, client, num_bytes in _rows(table):
                if num_bytes and port in self._ports:
                    queues[client] = queues.get(client, 0) + num_bytes
        return queues


def parse_peer(peer: str) -> Address | None:
    """Returns the address of a TCP client that gRPC names so; None for a client of another kind."""
    kind, _, address = peer.partition(":")
    host, _, port = urllib.parse.unquote(address).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    # An address of a link has the link's name at its end.
    return _name(ipaddress.ip_address(host.strip("[]").partition("%")[0])), int(port)


def _name(host: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Returns one name for a host, which a socket of both versions sees under two."""
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host)


def _rows(table: pathlib.Path) -> Iterator[tuple[int, Address, int]]:
    """Yields local port, remote address and bytes that are not acknowledged, by connection."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        _, local, remote, _, queues, *_ = line.split()
        host, _, port = remote.partition(":")
        # The kernel writes the words of an address as numbers of this machine, though they are in the network's order.
        words = struct.pack(f"={len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8)))
        name = _name(ipaddress.ip_address(words))
        yield int(local.partition(":")[2], 16), (name, int(port, 16)), int(queues.partition(":")[0], 16)
