"""Targets that gRPC would take for another server, or for none, are refused before a channel is opened."""

from __future__ import annotations

from typing import Any

import pytest

import lookonce
from lookonce.errors import ConfigurationError
from lookonce.sdk.target import checked_target


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
