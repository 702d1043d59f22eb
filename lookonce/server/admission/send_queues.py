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
import math
import pathlib
import struct
import urllib.parse
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

# One line for each TCP connection of this network namespace, after one line of titles.
_TABLES = tuple(pathlib.Path("/proc/self/net") / name for name in ("tcp", "tcp6"))
# Time between two looks. Clients' hosts acknowledge what they received after up to 40 ms.
LOOK_S = 0.02
# A client takes its answers if its host takes so many bytes, or all that there are. Otherwise one that takes a byte now
# and then could hold up a drain.
STEP_BYTES = 16_384

# Host and port of a client, the host as `ipaddress` writes it.
Address: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class _Queue:
    """The queue of one connection."""

    num_bytes: int
    # Bytes that the client's host has taken since `moved_s`. What was written between two looks hides some of them.
    taken_bytes: int = 0
    # Time at which the client's host had last taken a step.
    moved_s: float = -math.inf


class SendQueues:
    """The queues of all connections to some ports of this host. Use it from one event loop.

    Clients are called what gRPC calls them, such as "ipv4:127.0.0.1:50000".
    """

    def __init__(self) -> None:
        self._ports: set[int] = set()
        # Connections that have had bytes in their queue at a look.
        self._queues: dict[Address, _Queue] = {}
        self._looked_s = -math.inf
        self._lock = asyncio.Lock()

    def add_port(self, port: int) -> None:
        """Adds the connections to a port that this process listens at."""
        self._ports.add(port)

    async def emptied(self, peer: str) -> None:
        """Waits until the host of `peer` has received all that was written to it before the call."""
        address = parse_peer(peer)
        while True:
            if address not in await self.look():
                return
            await asyncio.sleep(LOOK_S)

    async def look(self) -> Collection[Address]:
        """Returns the clients whose hosts lack a part of what was written. Calls at the same time share one look."""
        asked_s = asyncio.get_running_loop().time()
        async with self._lock:
            if self._looked_s < asked_s:
                begun_s = asyncio.get_running_loop().time()
                # Some hosts have tens of thousands of connections.
                self._note(await asyncio.to_thread(self._read), begun_s)
        return [address for address, queue in self._queues.items() if queue.num_bytes]

    def moved_s(self, peer: str) -> float:
        """Returns when the host of `peer` last took a step of its answers, by the looks so far.

        The time is that of the event loop's clock, -infinity if it never has.
        """
        address = parse_peer(peer)
        queue = None if address is None else self._queues.get(address)
        return -math.inf if queue is None else queue.moved_s

    @property
    def last_moved_s(self) -> float:
        """The same for the hosts that lack something: the last time at which one of them took a step."""
        return max((queue.moved_s for queue in self._queues.values() if queue.num_bytes), default=-math.inf)

    @property
    def num_bytes(self) -> int:
        """Bytes that clients' hosts lacked at the last look."""
        return sum(queue.num_bytes for queue in self._queues.values())

    def _note(self, sizes: dict[Address, int], now_s: float) -> None:
        self._looked_s = now_s
        for address in self._queues.keys() | sizes.keys():
            num_bytes = sizes.get(address, 0)
            queue = self._queues.setdefault(address, _Queue(num_bytes))
            queue.taken_bytes += max(0, queue.num_bytes - num_bytes)
            queue.num_bytes = num_bytes
            if queue.taken_bytes >= STEP_BYTES or (queue.taken_bytes and not num_bytes):
                queue.taken_bytes, queue.moved_s = 0, now_s

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
