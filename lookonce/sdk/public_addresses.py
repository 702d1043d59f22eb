"""Finds the public addresses of a host, so that a URL from a stranger cannot reach a private network."""

from __future__ import annotations

import ipaddress
import socket
import threading
from typing import TypeAlias

from lookonce.errors import DeadlineError, UnavailableError
from lookonce.sdk.channel import Deadline

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

# Packets to these addresses are taken to the IPv4 address in their last four bytes (RFC 6052).
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
# "This network" (RFC 1122): Linux takes all of it for this machine.
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
# Protocol assignments (RFC 6890). Some releases of Python 3.11 count most of it as global.
_ASSIGNMENTS = ipaddress.IPv4Network("192.0.0.0/24")


def addresses_of(host: str, port: int, deadline: Deadline) -> list[Address]:
    """Returns the addresses of a host, IPv4 ones first. Raises UnavailableError without one, and DeadlineError."""
    found: list[list[Address]] = []
    failure: list[OSError] = []

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failure.append(error if isinstance(error, OSError) else OSError(str(error)))
        else:
            found.append([ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos])

    # The system's look-up has no limit of its own that a caller could set.
    thread = threading.Thread(target=look_up, name="image-url-dns", daemon=True)
    thread.start()
    thread.join(deadline.remaining_s())
    if not found and not failure:
        raise DeadlineError(f"the address of {host} was not found in time")
    if not found or not found[0]:
        raise UnavailableError(f"the host {host} has no address")
    return sorted(dict.fromkeys(found[0]), key=lambda address: address.version)


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet, as well as any IPv4 address that is hidden in it."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _TRANSLATED:
            return is_public(ipaddress.IPv4Address(address.packed[-4:]))
        hidden = (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
        if not all(one is None or is_public(one) for one in hidden):
            return False
    is_special = address.is_multicast or address.is_reserved or address in _ASSIGNMENTS
    return address.is_global and not is_special


def is_private_network(address: Address) -> bool:
    """Whether an address belongs to this machine or a private network.

    Link-local ones do not count: there clouds serve the keys of a machine.
    """
    if address.is_loopback:
        return True
    is_special = address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved
    return address.is_private and not is_special and address not in _THIS_NETWORK and address not in _ASSIGNMENTS
