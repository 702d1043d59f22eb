"""Clients with other options over the same connections, headers of the caller's own, abort, and readiness."""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lookonce
from lookonce.errors import AbortedError, ConfigurationError, DeadlineError, InvalidParameterError, UnavailableError
from lookonce.testing import FakeServer
from tests.lookonce.sdk.sdk_servers import running_system


async def test_other_options_hold_for_the_new_client_only() -> None:
    async with (
        running_system() as system,
        lookonce.AsyncClient.connect(system.decoder_target, headers={"X-Team": "a"}) as client,
    ):
        hasty = client.with_options(timeout_s=7.0, headers={"x-route": "canary"})
        both = hasty.with_options(headers={"x-team": "b"})
        for one, timeout_s, expected in [
            (client, 60.0, {"x-team": "a"}),
            (hasty, 7.0, {"x-team": "a", "x-route": "canary"}),
            (both, 7.0, {"x-team": "b", "x-route": "canary"}),
        ]:
            await one.generate("hello", max_tokens=1)
            _, _, left_s = system.knowledge.calls[-1]
            assert timeout_s - 5.0 < left_s < timeout_s + 1.0
            sent = {key: value for key, value in system.knowledge.metadata.items() if key in ("x-team", "x-route")}
            assert sent == expected


def test_no_deadline_is_an_option() -> None:
    client = lookonce.Client.connect("127.0.0.1:1", timeout_s=5.0)
    assert client.with_options(timeout_s=math.inf)._options.deadline(None).at_s is None
    assert client.with_options()._options == client._options
    client.close()


def test_retries_are_an_option_and_their_budget_is_shared() -> None:
    with FakeServer("a red square") as server, lookonce.Client.connect(server.target) as client:
        client.generate("hello")
        server.fail(UnavailableError("gone"))
        with pytest.raises(UnavailableError):
            client.with_options(max_retries=0).generate("hello")
        server.fail(UnavailableError("gone"))
        assert client.with_options(max_retries=1).generate("hello").text == "a red square"
        assert client.with_options(max_retries=1)._calls._retries is client._calls._retries


@pytest.mark.parametrize("is_first", [True, False])
async def test_closing_one_closes_both(is_first: bool) -> None:
    async with running_system() as system:
        first = lookonce.AsyncClient.connect(system.decoder_target)
        second = first.with_options(timeout_s=5.0)
        stream = second.stream("hello", max_tokens=5)
        assert await anext(stream)
        # The encoder's channel, which the second one opens, is closed with the first one.
        await second.encode([b"a picture"])
        await (first if is_first else second).aclose()
        for client in (first, second):
            with pytest.raises(AbortedError):
                await client.generate("hello")
            with pytest.raises(AbortedError):
                await client.encode([b"another"])


def test_closing_one_closes_both_synchronous_ones() -> None:
    with FakeServer("a red square") as server:
        first = lookonce.Client.connect(server.target)
        second = first.with_options(timeout_s=5.0)
        assert second.encode([b"a picture"])[0].encoding
        assert first._connection.info is second._connection.info is not None
        first.close()
        for client in (first, second):
            with pytest.raises(AbortedError):
                client.generate("hello")


@pytest.mark.parametrize("kind", [lookonce.Client, lookonce.AsyncClient])
@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"authorization": "Bearer x"}, "authorization is set by the client"),
        ({"X-Request-Id": "x"}, "x-request-id is set by the client"),
        ({"traceparent": "x"}, "traceparent is set by the client"),
        ({"grpc-timeout": "1S"}, "no name of a header"),
        ({"x-bin": "a"}, "no name of a header"),
        ({":path": "a"}, "no name of a header"),
        ({"a b": "a"}, "no name of a header"),
        ({"": "a"}, "no name of a header"),
        ({3: "a"}, "no name of a header"),
        ({"x": "secret-\u00e9"}, "value of the header x"),
        ({"x": "secret-\nvalue"}, "value of the header x"),
        ({"x": b"secret-"}, "value of the header x"),
        ({"x": "a", "X": "b"}, "given twice"),
        ({"x": "a" * 8192}, "more than 8192 bytes"),
        ([("x", "a")], "must be a mapping"),
    ],
)
def test_headers_that_no_call_could_send_are_refused(kind: Any, headers: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        kind.connect("127.0.0.1:1", headers=headers)
    assert "secret-" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=message):
        kind.connect("127.0.0.1:1").with_options(headers=headers)


async def test_admitted_headers_arrive() -> None:
    headers = {"x-empty": "", "x.dots_and-more": "a b;c", "x-long": "a" * 4000}
    async with running_system() as system:
        async with lookonce.AsyncClient.connect(system.decoder_target, headers=headers) as client:
            await client.generate("hello", max_tokens=1)
        assert {name: system.knowledge.metadata[name] for name in headers} == headers


@pytest.mark.parametrize("given", [0, -1.0, math.nan, "1"])
def test_a_bad_deadline_is_refused_at_once(given: Any) -> None:
    client = lookonce.AsyncClient.connect("127.0.0.1:1")
    with pytest.raises(InvalidParameterError, match="timeout_s"):
        client.with_options(timeout_s=given)


@pytest.mark.parametrize("given", [-1, 1.5, True])
def test_a_bad_number_of_retries_is_refused_at_once(given: Any) -> None:
    client = lookonce.AsyncClient.connect("127.0.0.1:1")
    with pytest.raises(InvalidParameterError, match="max_retries"):
        client.with_options(max_retries=given)


async def test_readiness_is_that_of_health() -> None:
    is_ready = False
    async with running_system(lambda: is_ready) as system:
        async with lookonce.AsyncClient.connect(system.decoder_target) as client:
            with pytest.raises(DeadlineError, match="no server could be reached that says it serves"):
                await client.wait_until_ready(timeout_s=0.5)
            is_ready = True
            await client.wait_until_ready(timeout_s=30.0)
        with pytest.raises(AbortedError):
            await client.wait_until_ready()
        with lookonce.Client.connect(system.decoder_target) as waiting:
            await asyncio.to_thread(waiting.wait_until_ready, timeout_s=30.0)
        with pytest.raises(AbortedError):
            waiting.wait_until_ready()


def test_nobody_at_the_address_is_not_ready() -> None:
    with lookonce.Client.connect("127.0.0.1:1") as client, pytest.raises(DeadlineError, match="no server"):
        client.wait_until_ready(timeout_s=0.3)


async def test_closing_ends_the_wait() -> None:
    client = lookonce.AsyncClient.connect("127.0.0.1:1")
    waiting = asyncio.create_task(client.wait_until_ready(timeout_s=60.0))
    await asyncio.sleep(0.1)
    await client.aclose()
    with pytest.raises(AbortedError):
        await waiting


def test_closing_ends_the_wait_of_another_thread() -> None:
    client = lookonce.Client.connect("127.0.0.1:1")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.wait_until_ready, timeout_s=60.0)
        time.sleep(0.1)
        client.close()
        with pytest.raises(AbortedError):
            waiting.result(timeout=30.0)


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, 5])
def test_an_id_that_no_request_has_is_refused(given: Any) -> None:
    with lookonce.Client.connect("127.0.0.1:1") as client, pytest.raises(InvalidParameterError, match="request_id"):
        client.abort(given)


async def test_each_user_has_a_token_of_its_own() -> None:
    picture = bytes(range(256)) * 400
    with FakeServer("an answer") as server:
        async with lookonce.AsyncClient.connect(server.target, token="of-the-program") as client:
            for token in ("first", "second"):
                await client.with_options(token=token).generate("hello")
            await client.generate("hello")
            sent = [request.metadata["authorization"] for request in server.requests]
            assert sent == ["Bearer first", "Bearer second", "Bearer of-the-program"]
            with pytest.raises(ConfigurationError):
                client.with_options(token="two words")
            # Two users may be two tenants: neither waits for the upload of the other.
            uploads = client._connection.uploads
            first, second = (uploads.turn(client.with_options(token=name)._options.caller) for name in ("a", "b"))
            assert first.pause_s([picture]) is None
            assert second.pause_s([picture]) is None
            assert uploads.turn("a").pause_s([picture]) is not None


@pytest.mark.parametrize("kind", [lookonce.Client, lookonce.AsyncClient])
async def test_a_users_token_goes_to_another_machine_over_tls_only(kind: Any) -> None:
    client = kind.connect("127.0.0.1:1", "10.0.0.1:1")
    with pytest.raises(ConfigurationError, match=r"would go to 10\.0\.0\.1:1 without TLS"):
        client.with_options(token="secret")
    other = kind.connect("127.0.0.1:1")
    with_token = other.with_options(token="secret")
    # The decoder announces its encoder later.
    with pytest.raises(ConfigurationError, match="without TLS"):
        with_token._connection.encoder("10.0.0.1:1", with_token._options)
    other._connection.encoder("10.0.0.1:1", other._options)
