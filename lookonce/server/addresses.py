"""Checks, before a service loads its model, that it can listen on the addresses of its settings."""

from __future__ import annotations

import socket

from lookonce.errors import ConfigurationError
from lookonce.server.settings import ServiceSettings

_FLAGS = ("listen", "admin_listen", "health_listen", "metrics_listen")


def check_addresses(settings: ServiceSettings) -> None:
    """Raises ConfigurationError for an address that is taken or is not of this machine.

    The addresses are free again afterwards, so another process may still take one while the model is loaded.
    """
    for name in _FLAGS:
        address = getattr(settings, name)
        # Port 0 is any free one.
        if address is not None and not address.endswith(":0"):
            _check(f"--{name.replace('_', '-')}", address)


def _check(flag: str, address: str) -> None:
    """Binds a socket to each address of a name, as gRPC does later. One that can be bound is enough."""
    host, _, port = address.rpartition(":")
    fault: OSError | None = None
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigurationError(f"{flag}: cannot listen on {address}: this machine has no such address") from None
    for family, kind, protocol, _, place in found:
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
    raise ConfigurationError(f"{flag}: cannot listen on {address}: {reason}")
