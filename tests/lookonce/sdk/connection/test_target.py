"""Targets that gRPC would take for another server, or for none, are refused before a channel is opened."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pathlib
from typing import Any

import pytest
import trustme

import lookonce
from lookonce.errors import ConfigurationError
from lookonce.sdk.connection.target import checked_target
from tests.lookonce.sdk.sdk_servers import running_system


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:50051",
        "decoder:1",
        "[::1]:65535",
        "ipv4:10.0.0.1:50051,10.0.0.2:50051",
        "ipv6:[::1]:50051",
        "ipv6:%5B::1%5D:50051",
        "dns:///decoder:50051",
        "dns:decoder:50051",
        "dns://10.0.0.2/decoder:50051",
        "unix:/run/decoder.sock",
        "unix:///run/decoder.sock",
        "unix:decoder.sock",
        "xds:///decoder",
    ],
)
def test_a_target_is_a_host_with_a_port_or_one_of_grpcs_schemes(target: str) -> None:
    assert checked_target(target) == target


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("", "host:port"),
        (" ", "without spaces"),
        ("127.0.0.1:50051 ", "without spaces"),
        ("decoder\n:1", "without spaces"),
        ("127.0.0.1", "with a port"),
        ("127.0.0.1:", "with a port"),
        (":50051", "with a port"),
        ("127.0.0.1:0", "1..65535"),
        ("127.0.0.1:99999", "1..65535"),
        ("127.0.0.1:+80", "1..65535"),
        ("::1:50051", "with a port"),
        ("ipv4:", "with a port"),
        ("ipv4:10.0.0.1:50051,10.0.0.2", "with a port"),
        ("http://127.0.0.1:50051", "without http://"),
        ("https://decoder.example.com", "without https://"),
        ("dns:", "with a port"),
        ("dns:///a", "with a port"),
        ("dns:///decoder.example.com", "with a port"),
        ("dns://10.0.0.2", "with a port"),
        ("unix:", "nothing after unix:"),
        ("unix:///", "nothing after unix:"),
        ("xds:///", "nothing after xds:"),
        (5, "must be a text"),
        (b"127.0.0.1:1", "must be a text"),
        (("127.0.0.1", 1), "must be a text"),
    ],
)
async def test_other_targets_are_refused_by_every_client(target: Any, words: str) -> None:
    kinds: list[Any] = [lookonce.Client, lookonce.AsyncClient, lookonce.AdminClient, lookonce.AsyncAdminClient]
    for kind in kinds:
        with pytest.raises(ConfigurationError, match=words):
            kind.connect(target)
    for kind in kinds[:2]:
        with pytest.raises(ConfigurationError, match=words):
            kind.connect("127.0.0.1:1", target)


@pytest.mark.parametrize(
    ("targets", "joined"),
    [
        (["decoder:1"], "decoder:1"),
        (["10.0.0.1:1", "10.0.0.2:2"], "ipv4:10.0.0.1:1,10.0.0.2:2"),
        (("[::1]:1", "[fe80::2]:2"), "ipv6:[::1]:1,[fe80::2]:2"),
    ],
)
def test_a_list_of_addresses_is_one_target(targets: Any, joined: str) -> None:
    assert checked_target(targets) == joined
    assert checked_target(joined) == joined


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([], "a list of targets"),
        (["decoder-0:1", "decoder-1:1"], "a name stands for all addresses"),
        (["10.0.0.1:1", "[::1]:1"], "of one version"),
        (["10.0.0.1:1", "10.0.0.2"], "with a port"),
        (["10.0.0.1:1", None], "must be a text"),
        (["dns:///a:1", "10.0.0.1:1"], "a list of targets"),
    ],
)
def test_other_lists_are_refused(targets: Any, words: str) -> None:
    for connect in (lookonce.Client.connect, lookonce.AsyncClient.connect):
        with pytest.raises(ConfigurationError, match=words):
            connect(targets)


def test_a_list_with_tls_is_refused_because_no_certificate_has_its_name(tmp_path: pathlib.Path) -> None:
    """Every call failed, with gRPC's words about the name."""
    authority = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(authority)
    for connect in (lookonce.Client.connect, lookonce.AsyncClient.connect):
        with pytest.raises(ConfigurationError, match="has no name"):
            connect(["10.0.0.1:1", "10.0.0.2:1"], tls_ca=authority)


async def test_calls_go_to_all_addresses_of_a_list() -> None:
    async with contextlib.AsyncExitStack() as exits:
        systems = [await exits.enter_async_context(running_system()) for _ in range(2)]
        targets = [system.decoder_target for system in systems]
        client = await exits.enter_async_context(lookonce.AsyncClient.connect(targets))
        async with asyncio.timeout(30):
            # Equal questions go to one of them.
            for number in itertools.count():
                await client.generate(f"word {number}")
                if all(system.knowledge.count("Generate") for system in systems):
                    break
