"""Requests about one picture meet at one replica, whatever comes and goes, and no call fails for it. Real servers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pathlib
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import trustme

from lookonce import AsyncClient, Client
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import AbortedError
from lookonce.sdk.connection.channel import ConnectionOptions, Deadline
from lookonce.sdk.routing import replicas
from lookonce.sdk.routing.replicas import AsyncReplicas
from lookonce.testing import FakeRequest, FakeServer, fake_decoder
from tests.lookonce.sdk.sdk_servers import running_system

PICTURES = [f"picture {number}".encode() for number in range(12)]
NAME = "decoders.example"


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    with contextlib.ExitStack() as exits:
        yield [exits.enter_context(FakeServer("seen")) for _ in range(3)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a client needs longer to connect than it waits in earnest."""
    monkeypatch.setattr(replicas, "_OPENING_S", 30.0)


def targets(servers: list[FakeServer]) -> list[str]:
    return [server.target for server in servers]


def places(servers: list[FakeServer], start: int = 0) -> dict[bytes, Counter[int]]:
    """Returns for each picture how many requests each server got."""
    found: dict[bytes, Counter[int]] = {}
    for number, server in enumerate(servers):
        for request in server.requests[start:]:
            found.setdefault(request.images[0].digest, Counter())[number] += 1
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_equal_pictures_meet_and_different_ones_spread(servers: list[FakeServer]) -> None:
    with Client.connect(targets(servers)) as client:
        for _ in range(3):
            for picture in PICTURES:
                client.generate("What is it?", images=[picture])
                assert "".join(client.stream("Where is it?", images=[picture])) == "seen"
    found = places(servers)
    assert len(found) == len(PICTURES)
    assert all(len(counts) == 1 and counts.total() == 6 for counts in found.values())
    assert all(len(server.requests) > 6 for server in servers)


async def test_equal_pictures_meet_for_asyncio_too(servers: list[FakeServer]) -> None:
    async with AsyncClient.connect(targets(servers)) as client:
        for _ in range(3):
            for picture in PICTURES:
                await client.generate("What is it?", images=[picture])
                assert [text async for text in client.stream("Where is it?", images=[picture])]
    assert all(len(counts) == 1 and counts.total() == 6 for counts in places(servers).values())


def test_two_clients_agree_also_from_the_first_call_on(servers: list[FakeServer]) -> None:
    for picture in PICTURES:
        for order in (servers, servers[::-1]):
            with Client.connect(targets(order)) as client:
                client.generate("What is it?", images=[picture])
    assert all(len(counts) == 1 for counts in places(servers).values())


async def test_all_calls_of_a_first_burst_meet(servers: list[FakeServer]) -> None:
    async with AsyncClient.connect(targets(servers)) as client:
        asked = (client.generate("What is it?", images=[picture]) for picture in PICTURES)
        await asyncio.gather(*asked)
        again = (client.generate("Where is it?", images=[picture]) for picture in PICTURES)
        await asyncio.gather(*again)
    # A burst may exceed a replica's share, so a picture may have two places.
    assert sum(len(counts) == 1 for counts in places(servers).values()) >= len(PICTURES) // 2


def test_conversations_without_pictures_stay(servers: list[FakeServer]) -> None:
    with Client.connect(targets(servers)) as client:
        for number in range(12):
            for _ in range(3):
                client.generate(f"question {number}")
    asked = {server.target: Counter(request.text for request in server.requests) for server in servers}
    assert all(set(counts.values()) == {3} for counts in asked.values())


async def test_no_call_fails_when_a_replica_goes_and_its_pictures_move(servers: list[FakeServer]) -> None:
    async with AsyncClient.connect(targets(servers)) as client:
        for picture in PICTURES:
            await client.generate("What is it?", images=[picture])
        before = places(servers)
        servers[0].close()
        starts = [len(server.requests) for server in servers]
        for _ in range(3):
            for picture in PICTURES:
                await client.generate("What is it?", images=[picture])
        for number, server in enumerate(servers):
            del server._decoder.requests[: starts[number]]
        after = places(servers)
    stayed = {digest for digest, counts in before.items() if 0 not in counts}
    assert 0 < len(stayed) < len(PICTURES)
    assert all(after[digest] == Counter({next(iter(before[digest])): 3}) for digest in stayed)
    assert sum(counts.total() for counts in after.values()) == 3 * len(PICTURES)


async def test_a_popular_picture_uses_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def answer(request: FakeRequest) -> str:
        assert may_end.wait(60)
        return "seen"

    with contextlib.ExitStack() as exits:
        servers = [exits.enter_context(FakeServer(answer)) for _ in range(3)]
        exits.callback(may_end.set)
        async with AsyncClient.connect(targets(servers)) as client:
            asking = [
                asyncio.create_task(client.generate("What is it?", images=[PICTURES[0 if number % 10 else 1]]))
                for number in range(30)
            ]
            await until(lambda: sum(len(server.requests) for server in servers) == 30)
            assert max(len(server.requests) for server in servers) <= 13, "1.25 times the mean"
            assert min(len(server.requests) for server in servers) >= 4
            may_end.set()
            await asyncio.gather(*asking)


def test_streams_count_until_they_end(servers: list[FakeServer]) -> None:
    with Client.connect(targets(servers)) as client:
        placement = client._connection._replicas._placement
        client.generate("What is it?", images=[PICTURES[0]])
        streams = [client.stream("What is it?", images=[PICTURES[0]]) for _ in range(4)]
        for _ in streams[0]:
            pass
        streams[1].close()
        deadline_s = time.monotonic() + 60
        # gRPC tells the end of a call in a thread of its own; all answers are there by then, read or not.
        while sum(placement.num_own(server.target) for server in servers):
            assert time.monotonic() < deadline_s
            streams[2].close()
            streams[3].close()
            time.sleep(0.01)


async def test_streams_count_until_they_end_for_asyncio_too(servers: list[FakeServer]) -> None:
    async with AsyncClient.connect(targets(servers)) as client:
        placement = client._connection._replicas._placement
        streams = [client.stream("What is it?", images=[PICTURES[0]]) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            await stream.aclose()
        asking = asyncio.create_task(client.generate("What is it?", images=[PICTURES[0]]))
        asyncio.get_running_loop().call_soon(asking.cancel)
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not sum(placement.num_own(server.target) for server in servers))


async def test_replicas_behind_a_name_come_and_go(servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this machine have different ports, unlike those behind a name, so the addresses are given here."""
    current = targets(servers)[:2]
    monkeypatch.setattr(replicas, "_RESOLUTION_AGE_S", 0.0)
    monkeypatch.setattr("lookonce.sdk.routing.resolution.Resolution.addresses", lambda _: tuple(sorted(current)))
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real("127.0.0.1", *rest, **more))
    async with AsyncClient.connect(f"{NAME}:50051", timeout_s=60) as client:
        for _ in range(2):
            for picture in PICTURES:
                await client.generate("What is it?", images=[picture])
        known = client._connection._replicas._known
        assert set(known) == set(current)
        assert not servers[2].requests
        current[:] = targets(servers)[1:]
        await until_asked(client, lambda: set(known) == set(current))
        num_first = len(servers[0].requests)
        for picture in PICTURES:
            await client.generate("What is it?", images=[picture])
        assert len(servers[0].requests) == num_first
        assert servers[2].requests
        current[:] = []
        await until_asked(client, lambda: not known)


@pytest.mark.parametrize("error", [socket.gaierror(-3, "try again"), UnicodeError("label too long")])
async def test_a_name_server_without_an_answer_fails_no_call(
    error: Exception, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client keeps the addresses that it knows."""
    current, num_asked = targets(servers), 0

    def addresses(_: Any) -> tuple[str, ...]:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            raise error
        return tuple(sorted(current))

    monkeypatch.setattr(replicas, "_RESOLUTION_AGE_S", 0.0)
    monkeypatch.setattr("lookonce.sdk.routing.resolution.Resolution.addresses", addresses)
    async with AsyncClient.connect(f"{NAME}:50051", timeout_s=60) as client:
        for _ in range(3):
            for picture in PICTURES:
                await client.generate("What is it?", images=[picture])
    assert num_asked > 1
    assert all(len(counts) == 1 for counts in places(servers).values())


async def test_a_slow_name_server_is_asked_once_and_nobody_waits_for_it(
    one_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, num_asked = threading.Event(), 0

    def addresses(_: Any) -> tuple[str, ...]:
        nonlocal num_asked
        num_asked += 1
        assert may_answer.wait(60)
        return ()

    monkeypatch.setattr(replicas, "_OPENING_S", 0.01)
    monkeypatch.setattr(replicas, "_RESOLUTION_AGE_S", 0.0)
    monkeypatch.setattr("lookonce.sdk.routing.resolution.Resolution.addresses", addresses)
    found = AsyncReplicas(f"{NAME}:50051", ConnectionOptions())
    for _ in range(5):
        await found.open(Deadline.after(60))
        assert found.place(b"anything", ()) is None
    assert num_asked == 1
    may_answer.set()
    await until(lambda: not found._is_resolving)
    assert found.place(b"anything", ()) is None
    await until(lambda: num_asked == 2)
    await found.close()


async def until_asked(client: AsyncClient, condition: Callable[[], bool]) -> None:
    """Asks the replica that stays until something is so: each question looks the name up."""
    async with asyncio.timeout(60):
        while not condition():
            place = client._connection._replicas.place(b"anything", ())
            if place is not None:
                place.leave()
            await asyncio.sleep(0.01)


async def test_replicas_are_asked_for_their_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client has 1,000 requests at the replica of this picture."""
    asked = Counter[str]()

    def load_of(self: Any, request: decoder_pb2.GetLoadRequest, context: Any) -> decoder_pb2.GetLoadResponse:
        metadata = dict(context.invocation_metadata())
        assert "x-lookonce-affinity" not in metadata
        assert metadata["x-of-caller"] == "yes"
        asked[self.target] += 1
        return decoder_pb2.GetLoadResponse(waiting_requests=1000 if self.target == popular else 0)

    monkeypatch.setattr(fake_decoder.FakeDecoder, "GetLoad", load_of)
    monkeypatch.setattr(replicas, "_LOOK_S", 0.0)
    monkeypatch.setattr(replicas, "_CALLS_PER_LOOK", 2)
    popular = ""
    async with contextlib.AsyncExitStack() as exits:
        servers = [exits.enter_context(FakeServer("seen")) for _ in range(3)]
        client = AsyncClient.connect(targets(servers), headers={"x-of-caller": "yes"})
        await exits.enter_async_context(client)
        await client.generate("What is it?", images=[PICTURES[0]])
        (popular,) = (server.target for server in servers if server.requests)
        for _ in range(6):
            await client.generate("What is it?", images=[PICTURES[0]])
        await until(lambda: len(asked) == 3)
        await until(lambda: popular in client._connection._replicas._placement._reports)
        await client.generate("Where is it?", images=[PICTURES[0]])
        (busy,) = (server for server in servers if server.target == popular)
        assert not any(request.text.startswith("Where") for request in busy.requests)


def test_proxies_are_told_what_to_route_by(servers: list[FakeServer]) -> None:
    with Client.connect(servers[0].target) as client:
        client.generate("What is it?", images=[PICTURES[0]])
        "".join(client.stream("Where is it?", images=[PICTURES[0]]))
    told = {request.metadata["x-lookonce-affinity"] for request in servers[0].requests}
    assert told == {servers[0].requests[0].images[0].digest[:16].hex()}


def test_calls_after_and_during_the_end_say_so(servers: list[FakeServer]) -> None:
    may_end = threading.Event()
    with FakeServer(lambda _: "late" if may_end.wait(60) else "") as slow:
        client = Client.connect([slow.target, servers[0].target])
        # The picture that the slow one gets.
        with ThreadPoolExecutor(len(PICTURES)) as threads:
            asking = [threads.submit(client.generate, "What is it?", images=[picture]) for picture in PICTURES]
            deadline_s = time.monotonic() + 60
            while not slow.requests:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            client.close()
            may_end.set()
            errors = [one.exception() for one in asking]
        assert any(errors)
        assert all(error is None or isinstance(error, AbortedError) for error in errors)
        with pytest.raises(AbortedError):
            client.generate("What is it?", images=[PICTURES[0]])


def test_a_client_that_nobody_refers_to_leaves_no_threads(servers: list[FakeServer]) -> None:
    before = client_threads()
    client = Client.connect(targets(servers))
    client.generate("What is it?", images=[PICTURES[0]])
    assert client_threads() - before
    del client
    deadline_s = time.monotonic() + 60
    while client_threads() - before:
        gc.collect()
        assert time.monotonic() < deadline_s, threading.enumerate()
        time.sleep(0.05)


def client_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if not one.name.startswith(("fake-server", "lookonce-images"))}


async def test_replicas_behind_a_name_must_have_its_certificate(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate has the name only, no address."""
    authority = trustme.CA()
    issued = authority.issue_cert(NAME)
    paths = [tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")]
    authority.cert_pem.write_to_path(paths[0])
    issued.cert_chain_pems[0].write_to_path(paths[1])
    issued.private_key_pem.write_to_path(paths[2])
    async with contextlib.AsyncExitStack() as exits:
        systems = [
            await exits.enter_async_context(running_system(tls_cert=paths[1], tls_key=paths[2])) for _ in range(2)
        ]
        addresses = tuple(sorted(system.decoder_target for system in systems))
        monkeypatch.setattr("lookonce.sdk.routing.resolution.Resolution.addresses", lambda _: addresses)
        for name, may_connect in ((NAME, True), ("others.example", False)):
            found = AsyncReplicas(f"{name}:50051", ConnectionOptions(tls_ca=paths[0]))
            monkeypatch.setattr(replicas, "_OPENING_S", 30.0 if may_connect else 1.0)
            await found.open(Deadline.after(60))
            place = found.place(b"anything", (("x-request-id", "one"),))
            assert (place is not None) is may_connect
            if place is not None:
                request = decoder_pb2.GenerateRequest(
                    params=decoder_pb2.GenerateParams(text=decoder_pb2.TextPrompt(text="word"))
                )
                answer = await place.stub.Generate(request, metadata=(("x-request-id", "one"),), timeout=60)
                assert answer.choices[0].text == "word +0"
            await found.close()


@pytest.fixture
async def one_server() -> AsyncIterator[FakeServer]:
    with FakeServer("seen") as server:
        yield server


async def test_one_server_needs_no_further_connection(one_server: FakeServer) -> None:
    async with AsyncClient.connect(one_server.target) as client:
        await client.generate("What is it?", images=[PICTURES[0]])
        assert client._connection._replicas._resolution is None
