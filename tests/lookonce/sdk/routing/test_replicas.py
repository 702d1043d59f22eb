"""Requests about one picture meet at one replica, whatever comes and goes, and no call fails for it. Real servers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import trustme

from lookonce import AsyncClient, Client
from lookonce.content_key import image_digest
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import AbortedError, DeadlineError, InvalidInputError
from lookonce.local.reserved_port import reserved_port
from lookonce.sdk.connection import channel
from lookonce.sdk.connection.channel import ConnectionOptions, Deadline
from lookonce.sdk.routing import replicas
from lookonce.sdk.routing.placed_streams import PlacedStream
from lookonce.sdk.routing.replicas import AsyncReplicas
from lookonce.testing import FakeRequest, FakeServer, fake_decoder
from tests.lookonce.sdk.sdk_servers import running_system

PICTURES = [f"picture {number}".encode() for number in range(30)]
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
    assert all(set(counts.values()) <= {3} for counts in asked.values()), "a server may have none of them"


async def test_no_call_fails_when_a_replica_goes_and_its_pictures_move(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient.connect(targets(servers)) as client:
        for picture in PICTURES:
            await client.generate("What is it?", images=[picture])
        before = places(servers)
        monkeypatch.setattr(replicas, "_OPENING_S", 0.0)
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
        assert found.place(b"anything") is None
    assert num_asked == 1
    may_answer.set()
    await until(lambda: not found._is_resolving)
    assert found.place(b"anything") is None
    await until(lambda: num_asked == 2)
    await found.close()


async def until_asked(client: AsyncClient, condition: Callable[[], bool]) -> None:
    """Asks the replica that stays until something is so: each question looks the name up."""
    async with asyncio.timeout(60):
        while not condition():
            place = client._connection._replicas.place(b"anything")
            if place is not None:
                place.leave()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("streams", [False, True])
async def test_answers_tell_the_load_of_other_clients(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client has 1,000 requests at the replica of this picture."""
    loads = Counter[str]()
    generate, generate_stream = fake_decoder.FakeDecoder.Generate, fake_decoder.FakeDecoder.GenerateStream

    def answer(self: Any, request: Any, context: Any) -> Any:
        response = generate(self, request, context)
        response.replica_load.waiting_requests = loads[self.target]
        return response

    def answer_in_pieces(self: Any, request: Any, context: Any) -> Any:
        for response in generate_stream(self, request, context):
            if response.HasField("finished"):
                response.finished.replica_load.running_requests = loads[self.target]
            yield response

    monkeypatch.setattr(fake_decoder.FakeDecoder, "Generate", answer)
    monkeypatch.setattr(fake_decoder.FakeDecoder, "GenerateStream", answer_in_pieces)

    async def ask(client: AsyncClient, question: str) -> None:
        if streams:
            assert [text async for text in client.stream(question, images=[PICTURES[0]])]
        else:
            await client.generate(question, images=[PICTURES[0]])

    async with contextlib.AsyncExitStack() as exits:
        servers = [exits.enter_context(FakeServer("seen")) for _ in range(3)]
        client = await exits.enter_async_context(AsyncClient.connect(targets(servers)))
        await ask(client, "first")
        (popular,) = (server for server in servers if server.requests)
        loads[popular.target] = 1000
        await ask(client, "second")
        await ask(client, "third")
        assert [request.text for request in popular.requests] == ["first", "second"]


def test_a_server_that_does_not_answer_in_time_is_passed_over(servers: list[FakeServer]) -> None:
    may_end = threading.Event()
    with FakeServer(lambda _: "late" if may_end.wait(60) else "") as frozen:
        client = Client.connect([frozen.target, *targets(servers)], max_retries=0)
        with client:
            client._connection._replicas.open(Deadline.after(60))
            candidates = (f"candidate {number}".encode() for number in itertools.count())
            picture = next(one for one in candidates if asks_first(client, one) == frozen.target)
            with pytest.raises(DeadlineError):
                client.generate("What is it?", images=[picture], timeout_s=0.5)
            assert client.generate("What is it?", images=[picture]).text == "seen"
            may_end.set()


def asks_first(client: Client, picture: bytes) -> str:
    """Returns the address to which a question about a picture would go."""
    place = client._connection._replicas.place(bytes(image_digest(picture))[:16])
    assert place is not None
    place.leave()
    return place.address


def stale_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every replica seem ready, as one does whose connection ends at this moment."""
    for kind in (replicas._SyncReplica, replicas._AsyncReplica):
        monkeypatch.setattr(kind, "is_ready", property(lambda _: True))


async def test_a_call_that_was_not_sent_goes_elsewhere_also_without_retries(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer("gone") as gone, Client.connect([gone.target, *targets(servers)], max_retries=0) as client:
        async with AsyncClient.connect([gone.target, *targets(servers)], max_retries=0) as other:
            await other.generate("are you there")
            client.generate("are you there")
            gone.close()
            await asyncio.sleep(0.5)
            stale_ready(monkeypatch)
            for picture in PICTURES:
                assert client.generate("What is it?", images=[picture]).text == "seen"
                assert "".join(client.stream("What is it?", images=[picture])) == "seen"
                client._connection._replicas._placement._rests.clear()
                assert (await other.generate("What is it?", images=[picture])).text == "seen"
                assert [text async for text in other.stream("What is it?", images=[picture])]
                other._connection._replicas._placement._rests.clear()
            for one in (client, other):
                placement = one._connection._replicas._placement
                assert not sum(placement._num_own.values())


def test_a_failed_stream_keeps_no_image(servers: list[FakeServer]) -> None:
    for server in servers:
        server.fail(*[InvalidInputError("no")] * 3)
    with Client.connect(targets(servers), max_retries=0) as client:
        client._connection._replicas.open(Deadline.after(60))
        stream = client.stream("What is it?", images=[PICTURES[0]])
        with pytest.raises(InvalidInputError):
            next(stream)
        assert isinstance(stream._call, PlacedStream)
        assert stream._call._search is None
        assert stream._call._start is None


def test_a_process_that_forks_goes_on(servers: list[FakeServer]) -> None:
    """In a process of its own: a fork copies the servers' threads as well."""
    program = """
import faulthandler, os, signal, sys, lookonce
faulthandler.register(signal.SIGUSR1)
client = lookonce.Client.connect(sys.argv[1:])
client.generate("one", images=[b"picture"])
child = os.fork()
if not child:
    # Exits without cleaning up, as multiprocessing's children do.
    with lookonce.Client.connect(sys.argv[1:]) as other:
        os._exit(0 if other.generate("two", images=[b"picture"]).text == "seen" else 1)
_, status = os.waitpid(child, 0)
client.generate("three", images=[b"picture"])
sys.exit(os.waitstatus_to_exitcode(status))
"""
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *targets(servers)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, messages = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            # Parent and child show where they wait.
            os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
            _, messages = process.communicate()
        assert process.returncode == 0, messages.decode()


def test_replicas_connect_anew_after_an_idle_time(servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    options = channel.channel_options

    def impatient(*arguments: Any, **keywords: Any) -> list[tuple[str, int | str]]:
        return [*options(*arguments, **keywords), ("grpc.client_idle_timeout_ms", 1000)]

    monkeypatch.setattr(replicas, "channel_options", impatient)
    with Client.connect(targets(servers)) as client:
        client.generate("What is it?", images=[PICTURES[0]])
        known = client._connection._replicas._known
        deadline_s = time.monotonic() + 60
        while all(vars(one.channel)["_channel"].check_connectivity_state(False) == 2 for one in known.values()):
            assert time.monotonic() < deadline_s, "some become idle"
            time.sleep(0.1)
        while sum(one.is_ready for one in known.values()) < len(known):
            assert time.monotonic() < deadline_s, "asking connects them"
            time.sleep(0.02)


def test_replicas_are_connected_to_without_threads(servers: list[FakeServer]) -> None:
    before = {one for one in threading.enumerate() if not one.name.startswith(("fake-server", "lookonce-images"))}
    with Client.connect(targets(servers)) as client:
        for picture in PICTURES[:3]:
            client.generate("What is it?", images=[picture])
        after = {one for one in threading.enumerate() if not one.name.startswith(("fake-server", "lookonce-images"))}
        # gRPC's own threads for calls end with them.
        assert not {one for one in after - before if "poll" not in one.name}


async def test_a_short_deadline_is_not_spent_on_connections(servers: list[FakeServer]) -> None:
    """One of the addresses never existed."""
    with reserved_port() as port:
        found = AsyncReplicas(f"ipv4:{','.join(targets(servers))},127.0.0.1:{port}", ConnectionOptions())
        await found.open(Deadline.after(0.2))
        assert 0 < found._opening_s(Deadline.after(4.0)) <= 1.0, "a quarter of the deadline"
        assert found._opening_s(Deadline.after(math.inf)) > 1.0
        await found.close()


class Breaking(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Raises in one call, and passes on a generator instead of the call's stream."""

    def __init__(self) -> None:
        self.raises = False

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        assert hasattr(request, "params"), "it sees no calls that the program has not made"
        if self.raises:
            raise RuntimeError("an interceptor's fault")
        return continuation(details, request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        if self.raises:
            raise RuntimeError("an interceptor's fault")
        call = continuation(details, request)
        return (response for response in call)


def test_odd_interceptors_leave_no_place_behind(servers: list[FakeServer]) -> None:
    breaking = Breaking()
    with Client.connect(targets(servers), interceptors=[breaking]) as client:
        for picture in PICTURES:
            client.generate("What is it?", images=[picture])
            assert "".join(client.stream("What is it?", images=[picture])) == "seen"
        breaking.raises = True
        with pytest.raises(RuntimeError):
            client.generate("What is it?", images=[PICTURES[0]])
        with pytest.raises(RuntimeError):
            "".join(client.stream("What is it?", images=[PICTURES[0]]))
        assert not sum(client._connection._replicas._placement._num_own.values())


async def test_streams_whose_deadline_passes_before_they_begin_leave_no_place_behind(
    servers: list[FakeServer],
) -> None:
    async with AsyncClient.connect(targets(servers)) as client:
        await client.generate("are you there")
        for _ in range(3):
            stream = client.stream("What is it?", images=[PICTURES[0]], timeout_s=0.05)
            await asyncio.sleep(0.1)
            with pytest.raises(DeadlineError):
                await anext(stream)
        assert not sum(client._connection._replicas._placement._num_own.values())


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


def test_a_client_that_nobody_refers_to_closes_its_channels(servers: list[FakeServer]) -> None:
    client = Client.connect(targets(servers))
    client.generate("What is it?", images=[PICTURES[0]])
    ended = weakref.ref(client._connection._replicas)
    del client
    gc.collect()
    assert ended() is None


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
            place = found.place(b"anything")
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
