"""A token leaves the machine without TLS only where the caller says so."""

from __future__ import annotations

import asyncio
import pathlib
import socket
from typing import Any

import pytest

import lookonce
from lookonce.errors import ConfigurationError
from lookonce.sdk.connection.target import checked_target, is_on_this_machine
from lookonce.testing import FakeServer
from tests.lookonce.sdk.sdk_servers import running_system

CLIENTS = [lookonce.Client, lookonce.AsyncClient, lookonce.AdminClient, lookonce.AsyncAdminClient]
HERE = [
    "127.0.0.1:50051",
    "127.9.8.7:1",
    "[::1]:50051",
    "localhost:50051",
    "LOCALHOST:50051",
    "dns:///localhost:50051",
    "dns:localhost:50051",
    "ipv4:127.0.0.1:1,127.0.0.2:1",
    "ipv6:[::1]:1",
    "ipv6:%5B::1%5D:1",
    "unix:/run/decoder.sock",
    "unix-abstract:decoder",
]
ELSEWHERE = [
    "localhost.:50051",
    "dns:///localhost.:50051",
    "dns://8.8.8.8/localhost:50051",
    "dns://8.8.8.8/127.0.0.1:50051",
    "vsock:2:50051",
    "10.0.0.1:50051",
    "[fe80::1]:50051",
    "0.0.0.0:50051",
    "decoder:50051",
    "localhost.example.com:50051",
    "127.0.0.1.example.com:50051",
    "dns:///decoder.lookonce.svc:50051",
    "ipv4:127.0.0.1:1,10.0.0.1:1",
    "xds:///decoder",
    "google-c2p:///decoder",
]


@pytest.mark.parametrize(("target", "is_here"), [*((one, True) for one in HERE), *((one, False) for one in ELSEWHERE)])
def test_where_a_target_is(target: str, is_here: bool) -> None:
    assert is_on_this_machine(checked_target(target)) == is_here


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_token_for_another_machine_needs_tls(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="would go to decoder:50051 without TLS") as caught:
        kind.connect("decoder:50051", token="secret-token")
    assert "secret-token" not in str(caught.value)
    kind.connect("decoder:50051")
    kind.connect("decoder:50051", token="secret-token", tls_ca="system")
    kind.connect("decoder:50051", token="secret-token", token_over_plaintext=True)
    kind.connect("127.0.0.1:50051", token="secret-token")


@pytest.mark.parametrize("kind", [lookonce.Client, lookonce.AsyncClient])
def test_the_encoder_is_another_machine_too(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="would go to encoder:50051 without TLS"):
        kind.connect("127.0.0.1:50051", "encoder:50051", token="secret")


async def test_an_encoder_that_the_decoder_announces_gets_no_token_either() -> None:
    async with running_system() as system:
        system.decoder.encoder_target = "encoder.example:50051"
        async with lookonce.AsyncClient.connect(system.decoder_target, token="secret") as client:
            await client.generate("hello", max_tokens=1)
            with pytest.raises(ConfigurationError, match=r"would go to encoder\.example:50051 without TLS"):
                await client.encode([b"a picture"])


@pytest.mark.parametrize(("value", "is_allowed"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_the_environment_may_allow_it(value: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_TARGET", "decoder:50051")
    monkeypatch.setenv("LOOKONCE_TOKEN", "secret")
    monkeypatch.setenv("LOOKONCE_TOKEN_OVER_PLAINTEXT", value)
    if is_allowed:
        lookonce.Client.connect().close()
    else:
        with pytest.raises(ConfigurationError, match="without TLS"):
            lookonce.Client.connect()
    # The environment speaks of its own target only.
    with pytest.raises(ConfigurationError, match="without TLS"):
        lookonce.Client.connect("decoder:50051", token="secret")


def test_another_value_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_TARGET", "decoder:50051")
    monkeypatch.setenv("LOOKONCE_TOKEN_OVER_PLAINTEXT", "maybe")
    with pytest.raises(ConfigurationError, match="LOOKONCE_TOKEN_OVER_PLAINTEXT must be true or false"):
        lookonce.Client.connect()


def test_a_file_of_authorities_is_enough(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("-----BEGIN CERTIFICATE-----")
    lookonce.AsyncClient.connect("decoder:50051", token="secret", tls_ca=file)


@pytest.mark.parametrize("given", ["false", "", 0, 1, None])
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_permission_is_true_or_false(kind: Any, given: Any) -> None:
    """A program that passes the text of a variable would have allowed what it forbids."""
    with pytest.raises(ConfigurationError, match="must be True or False"):
        kind.connect("127.0.0.1:1", token_over_plaintext=given)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_no_proxy_is_asked_for_this_machine(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC sent the calls, with their token, to the proxy."""
    with FakeServer("an answer") as server, socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        proxy.settimeout(0.0)
        port = server.target.rpartition(":")[2]
        for target in (server.target, f"localhost:{port}", f"ipv4:127.0.0.1:{port}", f"dns:///localhost:{port}"):
            with lookonce.Client.connect(target, token="secret", timeout_s=30.0) as client:
                assert client.generate("hello").text == "an answer"

            async def ask(target: str = target) -> str:
                async with lookonce.AsyncClient.connect(target, token="secret", timeout_s=30.0) as client:
                    return (await client.generate("hello")).text

            assert asyncio.run(ask()) == "an answer"
        with pytest.raises(BlockingIOError):
            proxy.accept()
