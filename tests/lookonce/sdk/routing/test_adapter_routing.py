"""Requests for an adapter go to a replica that has it, and adapters that no replica has are refused. Real servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from lookonce import AdminClient, AsyncClient, Client
from lookonce.errors import InvalidParameterError, UnavailableError
from lookonce.local.reserved_port import reserved_port
from lookonce.sdk.routing import adapter_map, replicas
from lookonce.testing import FakeRequest, FakeServer


def answer(request: FakeRequest) -> str:
    return request.adapter or "base"


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    """Three replicas, of which one has `forms` and two have `bills`."""
    with contextlib.ExitStack() as exits:
        yield [exits.enter_context(FakeServer(answer, adapters=names)) for names in (["bills"], ["bills", "forms"], [])]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a client needs longer to connect than it waits in earnest."""
    monkeypatch.setattr(replicas, "_OPENING_S", 30.0)


def targets(servers: list[FakeServer]) -> list[str]:
    return [server.target for server in servers]


def num_requests(servers: list[FakeServer]) -> list[int]:
    return [len(server.requests) for server in servers]


def calls(client: Client, text: str) -> list[Callable[[], object]]:
    """Returns one call of each kind for the adapter `forms`."""
    return [
        lambda: client.generate(text, adapter="forms").text,
        lambda: "".join(client.stream(text, adapter="forms")),
        lambda: client.score(text, ["yes"], adapter="forms"),
        lambda: client.embed(text, adapter="forms"),
    ]


@pytest.mark.parametrize("kind", range(4))
def test_the_replica_with_the_adapter_gets_the_request(servers: list[FakeServer], kind: int) -> None:
    with Client.connect(targets(servers), max_retries=0) as client:
        # Different texts would go to different replicas.
        for number in range(20):
            calls(client, f"question {number}")[kind]()
        assert num_requests(servers)[1] == 20
        assert sum(num_requests(servers)) <= 22, "each of the others refuses it once"
        placement = client._connection._replicas._placement
        assert not any(placement.num_own(server.target) for server in servers)


@pytest.mark.parametrize("streams", [False, True])
async def test_the_same_for_asyncio(servers: list[FakeServer], streams: bool) -> None:
    async with AsyncClient.connect(targets(servers), max_retries=0) as client:
        for number in range(20):
            text = f"question {number}"
            if streams:
                assert "".join([part async for part in client.stream(text, adapter="forms")]) == "forms"
            else:
                assert (await client.generate(text, adapter="forms")).text == "forms"
        await client.score("what", ["yes"], adapter="forms")
        await client.embed("what", adapter="forms")
        assert num_requests(servers)[1] == 22
        assert sum(num_requests(servers)) <= 24
        placement = client._connection._replicas._placement
        assert not any(placement.num_own(server.target) for server in servers)


def test_replicas_that_have_it_share_the_requests(servers: list[FakeServer]) -> None:
    with Client.connect(targets(servers)) as client:
        for number in range(40):
            assert client.generate(f"question {number}", adapter="bills").text == "bills"
            assert client.generate(f"question {number}").text == "base"
    asked = [[request.adapter for request in server.requests] for server in servers]
    assert all(names.count("bills") > 8 for names in asked[:2])
    assert asked[2].count("bills") <= 1
    assert all("" in names for names in asked), "the base model is everywhere"


def test_an_adapter_that_no_replica_has_gets_the_error_of_one(servers: list[FakeServer]) -> None:
    with Client.connect(targets(servers)) as client:
        for call in (lambda: client.generate("what", adapter="none"), lambda: [*client.stream("what", adapter="none")]):
            with pytest.raises(InvalidParameterError, match="'none' is not served") as caught:
                call()
            assert caught.value.field == "adapter"
    assert num_requests(servers) == [2, 2, 2]


async def test_an_adapter_that_no_replica_has_for_asyncio(servers: list[FakeServer]) -> None:
    async with AsyncClient.connect(targets(servers)) as client:
        with pytest.raises(InvalidParameterError, match="'none' is not served"):
            await client.generate("what", adapter="none")
        with pytest.raises(InvalidParameterError, match="'none' is not served"):
            [part async for part in client.stream("what", adapter="none")]
    assert num_requests(servers) == [2, 2, 2]


def test_an_adapter_that_moves_is_found_at_once(servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    with Client.connect(targets(servers), max_retries=0) as client:
        client.generate("what", adapter="forms")
        for old, new in ((1, 0), (0, 2)):
            with AdminClient.connect(servers[old].target) as admin:
                admin.unload_adapter("forms")
            with pytest.raises(InvalidParameterError, match="forms"):
                client.generate("what", adapter="forms")
            with AdminClient.connect(servers[new].target) as admin:
                admin.load_adapter("forms")
            before = len(servers[new].requests)
            assert client.generate("what", adapter="forms").text == "forms"
            assert len(servers[new].requests) == before + 1
        # Both have it, and the one that has it anew is used when its refusal is old.
        with AdminClient.connect(servers[1].target) as admin:
            admin.load_adapter("forms")
        monkeypatch.setattr(adapter_map, "_REFUSAL_AGE_S", 0.0)
        before = len(servers[1].requests)
        for number in range(20):
            client.generate(f"question {number}", adapter="forms")
        assert len(servers[1].requests) > before


def test_a_replica_that_is_away_with_the_adapter_is_no_fault_of_the_request(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_STARTING_S", 0.0)
    with Client.connect(targets(servers), max_retries=0) as client:
        client.generate("what", adapter="forms")
        assert client.model_info(fresh=True).adapters == ("bills", "forms")
        monkeypatch.setattr(replicas, "_OPENING_S", 0.0)
        servers[1].close()
        deadline_s = time.monotonic() + 60
        known = client._connection._replicas
        while len(known.described()[0]) > 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        for call in calls(client, "what"):
            with pytest.raises(UnavailableError, match="'forms', and others may"):
                call()
        with pytest.raises(InvalidParameterError, match="none"):
            client.generate("what", adapter="none")
        assert client.generate("what", adapter="bills").text == "bills"
        assert client.model_info(fresh=True).adapters == ("bills", "forms")


def test_at_the_start_a_replica_that_is_not_connected_yet_may_have_it(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_OPENING_S", 0.5)
    with (
        reserved_port() as port,
        Client.connect([servers[0].target, servers[2].target, f"127.0.0.1:{port}"], max_retries=0) as client,
    ):
        with pytest.raises(UnavailableError, match="'forms', and others may"):
            client.generate("what", adapter="forms")
        monkeypatch.setattr(replicas, "_STARTING_S", 0.0)
        with pytest.raises(InvalidParameterError, match="'forms' is not served"):
            client.generate("what", adapter="forms")


def test_one_server_is_asked_once(servers: list[FakeServer]) -> None:
    with Client.connect(servers[0].target) as client:
        with pytest.raises(InvalidParameterError, match="'forms' is not served"):
            client.generate("what", adapter="forms")
        assert client.model_info().adapters == ("bills",)
    assert num_requests(servers) == [1, 0, 0]


async def test_a_description_has_the_adapters_of_all_replicas(servers: list[FakeServer]) -> None:
    with Client.connect(targets(servers)) as client:
        assert client.model_info().adapters == ("bills", "forms")
        assert client.model_info().adapters == ("bills", "forms")
    async with AsyncClient.connect(targets(servers)) as asking:
        assert (await asking.model_info()).adapters == ("bills", "forms")
        with AdminClient.connect(servers[2].target) as admin:
            admin.load_adapter("letters")
        assert (await asking.model_info()).adapters == ("bills", "forms")
        assert (await asking.model_info(fresh=True)).adapters == ("bills", "forms", "letters")
