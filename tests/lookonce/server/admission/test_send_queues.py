"""The kernel's queues of bytes that clients' hosts have not received, by real connections."""

from __future__ import annotations

import asyncio
import math
import pathlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lookonce.server.admission import send_queues
from lookonce.server.admission.send_queues import STEP_BYTES, SendQueues, parse_peer

# More than the kernel keeps for a client with the smallest buffer, less than it takes from a server at once.
NUM_BYTES = 60_000
PEER, CLIENT = "ipv4:127.0.0.1:1", ("127.0.0.1", 1)
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
        await queues.emptied(name)
        assert await asyncio.to_thread(server.send, bytes(NUM_BYTES)) == NUM_BYTES
        assert [parse_peer(name)] == await queues.look()
        assert 0 < queues.num_bytes <= NUM_BYTES
        waiting = asyncio.create_task(queues.emptied(name))
        # Another client has nothing to wait for.
        await queues.emptied(peer.format(1))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        await asyncio.to_thread(client.recv, NUM_BYTES, socket.MSG_WAITALL)
        async with asyncio.timeout(30):
            await waiting
        assert not await queues.look()
        assert queues.num_bytes == 0


async def moved(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns for each look whether it found that the client had taken a step, by the sizes of its queue."""
    left = iter(sizes)
    monkeypatch.setattr(SendQueues, "_read", lambda _: {CLIENT: size} if (size := next(left)) else {})
    queues, found = SendQueues(), []
    for _ in sizes:
        before_s = max(queues.moved_s(PEER), 0.0)
        await queues.look()
        assert queues.last_moved_s == (queues.moved_s(PEER) if queues.num_bytes else -math.inf)
        found.append(queues.moved_s(PEER) > before_s)
    assert queues.moved_s("ipv4:127.0.0.1:2") == queues.moved_s("unix:") == -math.inf
    return found


async def test_a_client_moves_by_steps_of_some_size_however_much_is_written_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = 10 * STEP_BYTES
    assert await moved([full, full - STEP_BYTES, full, full - STEP_BYTES // 2, full], monkeypatch) == [0, 1, 0, 0, 0]
    assert await moved([full, full - 10, full, full - STEP_BYTES + 10, full], monkeypatch) == [0, 0, 0, 1, 0]
    assert await moved([full] + [full - number for number in range(50)], monkeypatch) == [0] * 51


async def test_a_client_that_takes_all_moves_however_little_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await moved([0, 100, 60, 0, 0, 5, 0], monkeypatch) == [0, 0, 0, 1, 0, 0, 1]


async def test_connections_to_other_ports_do_not_count() -> None:
    with connected(*FAMILIES["ipv4"][:3]) as (port, server, client):
        await asyncio.to_thread(server.send, bytes(NUM_BYTES))
        queues = SendQueues()
        queues.add_port(client.getsockname()[1])
        assert not await queues.look()
        queues.add_port(port)
        assert await queues.look()


async def test_a_client_that_has_gone_is_not_waited_for() -> None:
    with connected(*FAMILIES["ipv4"][:3]) as (port, server, client):
        queues = SendQueues()
        queues.add_port(port)
        await asyncio.to_thread(server.send, bytes(NUM_BYTES))
        waiting = asyncio.create_task(queues.emptied(f"ipv4:127.0.0.1:{client.getsockname()[1]}"))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        # It has not read all, so its kernel resets the connection.
        client.close()
        async with asyncio.timeout(30):
            await waiting


async def test_without_the_kernels_files_all_queues_look_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queues, "_TABLES", (pathlib.Path("/nowhere/tcp"),))
    with connected(*FAMILIES["ipv4"][:3]) as (port, server, client):
        queues = SendQueues()
        queues.add_port(port)
        await asyncio.to_thread(server.send, bytes(NUM_BYTES))
        await queues.emptied(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
        assert not await queues.look()


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
