"""The kernel's queues of bytes that clients' hosts have not received, by real connections."""

from __future__ import annotations

import asyncio
import pathlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lookonce.server.admission import send_queues
from lookonce.server.admission.send_queues import SendQueues, parse_peer

# More than the kernel keeps for a client with the smallest buffer, less than it takes from a server at once.
NUM_BYTES = 60_000
FAMILIES = {
    "ipv4": (socket.AF_INET, "127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
    "ipv6": (socket.AF_INET6, "::1", "::1", "ipv6:%5B::1%5D:{}"),
    # gRPC listens so at all addresses.
    "ipv4 at an ipv6 socket": (socket.AF_INET6, "::", "127.0.0.1", "ipv4:127.0.0.1:{}"),
}


@contextmanager
def connected(family: int, listen: str, connect: str) -> Iterator[tuple[int, socket.socket, socket.socket]]:
    """A connection whose client reads nothing by itself: the server's port, its socket and the client's."""
    with ExitStack() as opened:
        listening = opened.enter_context(socket.socket(family))
        if listen == "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((listen, 0))
        listening.listen()
        port = listening.getsockname()[1]
        client = opened.enter_context(socket.socket(socket.AF_INET if "." in connect else socket.AF_INET6))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((connect, port))
        server = opened.enter_context(listening.accept()[0])
        yield port, server, client


@pytest.mark.parametrize(("family", "listen", "connect", "peer"), FAMILIES.values(), ids=FAMILIES)
async def test_waits_until_the_client_has_all(family: int, listen: str, connect: str, peer: str) -> None:
    with connected(family, listen, connect) as (port, server, client):
        name = peer.format(client.getsockname()[1])
        queues = SendQueues()
        queues.add_port(port)
        await queues.emptied(name, lambda: None)
        assert await asyncio.to_thread(server.send, bytes(NUM_BYTES)) == NUM_BYTES
        assert await queues.hold_any()
        waiting = asyncio.create_task(queues.emptied(name, lambda: None))
        for_all = asyncio.create_task(queues.all_emptied(lambda: None))
        # Another client has nothing to wait for.
        await queues.emptied(peer.format(1), lambda: None)
        done, _ = await asyncio.wait({waiting, for_all}, timeout=0.2)
        assert not done
        await asyncio.to_thread(client.recv, NUM_BYTES, socket.MSG_WAITALL)
        async with asyncio.timeout(30):
            await asyncio.gather(waiting, for_all)
        assert not await queues.hold_any()


async def test_each_part_that_arrives_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, moves = iter([100, 100, 60, 80, 70, 0]), []
    monkeypatch.setattr(SendQueues, "_read", lambda _: {("127.0.0.1", 1): next(sizes)})
    await SendQueues().emptied("ipv4:127.0.0.1:1", lambda: moves.append("moved"))
    # Once at the start, and for 60, 70 and 0.
    assert len(moves) == 4


async def test_connections_to_other_ports_do_not_count() -> None:
    with connected(*FAMILIES["ipv4"][:3]) as (port, server, client):
        await asyncio.to_thread(server.send, bytes(NUM_BYTES))
        queues = SendQueues()
        queues.add_port(client.getsockname()[1])
        assert not await queues.hold_any()
        queues.add_port(port)
        assert await queues.hold_any()


async def test_a_client_that_has_gone_is_not_waited_for() -> None:
    with connected(*FAMILIES["ipv4"][:3]) as (port, server, client):
        queues = SendQueues()
        queues.add_port(port)
        await asyncio.to_thread(server.send, bytes(NUM_BYTES))
        waiting = asyncio.create_task(queues.all_emptied(lambda: None))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        # It has not read all, so its kernel resets the connection.
        client.close()
        async with asyncio.timeout(30):
            await waiting


async def test_without_the_kernels_files_all_queues_look_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queues, "_TABLES", (pathlib.Path("/nowhere/tcp"),))
    with connected(*FAMILIES["ipv4"][:3]) as (port, server, _):
        queues = SendQueues()
        queues.add_port(port)
        await asyncio.to_thread(server.send, bytes(NUM_BYTES))
        await queues.all_emptied(lambda: None)
        assert not await queues.hold_any()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:50051", ("10.1.2.3", 50051)),
        ("ipv6:%5B2001:db8::1%5D:1", ("2001:db8::1", 1)),
        ("ipv6:[::1]:2", ("::1", 2)),
        ("ipv6:%5Bfe80::1%25eth0%5D:3", ("fe80::1", 3)),
        ("ipv6:%5B::ffff:10.1.2.3%5D:4", ("10.1.2.3", 4)),
        ("unix:/tmp/a:5", None),
        ("unix:", None),
        ("", None),
    ],
)
def test_names_of_clients(peer: str, address: tuple[str, int] | None) -> None:
    assert parse_peer(peer) == address
