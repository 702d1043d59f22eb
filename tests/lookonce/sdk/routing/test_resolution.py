"""Targets that stand for several replicas, and those that do not."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from lookonce.sdk.routing import resolution
from lookonce.sdk.routing.resolution import Resolution, resolution_of


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("ipv4:10.0.0.1:50051,10.0.0.2:50051", Resolution(("10.0.0.1:50051", "10.0.0.2:50051"))),
        ("ipv6:[::1]:5,[::2]:5", Resolution(("[::1]:5", "[::2]:5"))),
        ("ipv6:%5B::1%5D:5,%5B::2%5D:5", Resolution(("[::1]:5", "[::2]:5"))),
        ("decoders:50051", Resolution(host="decoders", port=50051)),
        ("dns:///decoders.lookonce.svc:50051", Resolution(host="decoders.lookonce.svc", port=50051)),
        ("dns:decoders:50051", Resolution(host="decoders", port=50051)),
        # One server.
        ("ipv4:10.0.0.1:50051", None),
        ("10.0.0.1:50051", None),
        ("[::1]:50051", None),
        ("localhost:50051", None),
        # gRPC alone knows the addresses.
        ("dns://10.0.0.53/decoders:50051", None),
        ("unix:/run/decoder", None),
        ("xds:///decoders", None),
    ],
)
def test_targets(target: str, expected: Resolution | None) -> None:
    assert resolution_of(target) == expected


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_with_a_proxy_grpc_alone_knows_how_to_reach_a_name(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that `no_proxy` excludes would else be reached by its addresses, which it does not exclude."""
    monkeypatch.setenv(variable, "http://10.0.0.9:3128")
    assert resolution_of("decoders:50051") is None
    assert resolution_of("ipv4:10.0.0.1:50051,10.0.0.2:50051") is None
    assert resolution_of("ipv4:127.0.0.1:50051,127.0.0.1:50052") is not None, "no proxy is asked for this machine"


def answer(*hosts: str) -> Any:
    return lambda host, port, type: [(2, type, 6, "", (one, port)) for one in hosts]


def test_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Resolution(host="decoders", port=7)
    monkeypatch.setattr(socket, "getaddrinfo", answer("10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"))
    assert named.addresses() == ("10.0.0.1:7", "10.0.0.2:7", "[fd00::1]:7")
    assert named.authority == "decoders:7"


def test_very_many_replicas_are_left_to_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "_MAX_REPLICAS", 2)
    assert Resolution(("a:1", "b:1")).addresses() == ("a:1", "b:1")
    assert Resolution(("a:1", "b:1", "c:1")).addresses() == ()
