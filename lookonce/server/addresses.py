"""Checks, before a service loads its model, that it can listen on the addresses of its settings."""

from __future__ import annotations

import ipaddress
import itertools
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from lookonce.errors import ConfigurationError
from lookonce.server.settings import ServiceSettings

_NAMES = ("listen", "admin_listen", "health_listen", "metrics_listen", "rank_listen")


class _Resolved(NamedTuple):
    """An address of the settings, and the sockets' addresses that it names."""

    flag: str
    # host:port as it was given.
    address: str
    # (family, type, protocol, canonical name, socket address) of each.
    found: Sequence[tuple[Any, ...]]

    @property
    def places(self) -> set[tuple[Any, int]]:
        """The IP addresses with their ports. IPv4 addresses in IPv6's notation become IPv4 addresses."""
        ips = ((ipaddress.ip_address(place[0]), place[1]) for *_, place in self.found)
        return {(getattr(ip, "ipv4_mapped", None) or ip, port) for ip, port in ips}


def check_addresses(settings: ServiceSettings) -> None:
    """Raises ConfigurationError for an address that is taken, is not of this machine, or is in two settings.

    The addresses are free again afterwards, so another process may still take one while the model is loaded.
    """
    addresses = {name: getattr(settings, name, None) for name in _NAMES}
    # Port 0 is any free one.
    resolved = [
        _resolve(f"--{name.replace('_', '-')}", address)
        for name, address in addresses.items()
        if address is not None and not address.endswith(":0")
    ]
    for one, other in itertools.combinations(resolved, 2):
        if _overlap(one, other):
            raise ConfigurationError(
                f"{one.flag} {one.address} and {other.flag} {other.address} are one address; give each its own"
            )
    for each in resolved:
        _check(each)


def _resolve(flag: str, address: str) -> _Resolved:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigurationError(f"{flag}: cannot listen on {address}: this machine has no such address") from None
    return _Resolved(flag, address, found)


def _overlap(one: _Resolved, other: _Resolved) -> bool:
    """Whether two servers would share a socket address. gRPC takes 0.0.0.0 for all addresses of both families."""
    return any(
        port == other_port and (ip == other_ip or ip.is_unspecified or other_ip.is_unspecified)
        for (ip, port), (other_ip, other_port) in itertools.product(one.places, other.places)
    )


def _check(resolved: _Resolved) -> None:
    """Binds a socket to each address of a name, as gRPC does later. One that can be bound is enough."""
    fault: OSError | None = None
    for family, kind, protocol, _, place in resolved.found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # gRPC sets it as well: the connections of an ended process do not keep its port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            fault = error
        else:
            return
    reason = "it has no address" if fault is None else fault.strerror
    raise ConfigurationError(f"{resolved.flag}: cannot listen on {resolved.address}: {reason}")
