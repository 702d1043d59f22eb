"""Finds the public addresses of a host, so that a URL from a stranger cannot reach a private network."""

from __future__ import annotations

import ipaddress
import socket
import threading
from typing import TypeAlias

from lookonce.errors import DeadlineError, UnavailableError
from lookonce.sdk.connection.channel import Deadline

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

# Packets to these addresses are taken to the IPv4 address in their last four bytes (RFC 6052).
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
# All of the public internet in IPv6 (https://www.iana.org/assignments/ipv6-address-space).
_UNICAST = ipaddress.IPv6Network("2000::/3")
# Networks of special purpose that some releases of Python count as public: protocol assignments, the relays of 6to4,
# documentation, and the address at which Azure serves its virtual machines.
_SPECIAL = tuple(
    ipaddress.ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "168.63.129.16/32")
)
# Networks of a provider or a cluster (RFC 6598).
_SHARED = ipaddress.IPv4Network("100.64.0.0/10")
# "This network" (RFC 1122): Linux takes all of it for this machine.
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
# Look-ups at the same time: one that gets no answer keeps its thread, perhaps for minutes.
_look_ups = threading.BoundedSemaphore(64)


class UnknownHostError(Exception):
    """No host has this name."""


def addresses_of(host: str, port: int, deadline: Deadline) -> list[Address]:
    """Returns the addresses of a host, IPv4 ones first.

    Raises UnknownHostError, UnavailableError if no name server answers, and DeadlineError.
    """
    found: list[list[Address]] = []
    failure: list[OSError] = []

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failure.append(error if isinstance(error, OSError) else OSError(str(error)))
        else:
            found.append([ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos])
        finally:
            _look_ups.release()

    # The system's look-up has no limit of its own that a caller could set.
    if not _look_ups.acquire(timeout=deadline.remaining_s()):
        raise DeadlineError(f"the address of {host} was not found in time: name servers do not answer")
    thread = threading.Thread(target=look_up, name="image-url-dns", daemon=True)
    thread.start()
    thread.join(deadline.remaining_s())
    if not found and not failure:
        raise DeadlineError(f"the address of {host} was not found in time")
    if failure and isinstance(failure[0], socket.gaierror) and failure[0].errno == socket.EAI_AGAIN:
        raise UnavailableError(f"no name server answers for {host}")
    if not found or not found[0]:
        raise UnknownHostError
    return sorted(dict.fromkeys(found[0]), key=lambda address: address.version)


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet, as well as any IPv4 address that is hidden in it."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _TRANSLATED:
            return is_public(ipaddress.IPv4Address(address.packed[-4:]))
        hidden = (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
        if not all(one is None or is_public(one) for one in hidden):
            return False
        if address not in _UNICAST:
            return False
    is_special = address.is_multicast or address.is_reserved or any(address in network for network in _SPECIAL)
    return address.is_global and not is_special


def is_private_network(address: Address) -> bool:
    """Whether an address belongs to this machine or a private network.

    Link-local ones do not count: there clouds serve the keys of a machine.
    """
    if address.is_loopback or address in _SHARED:
        return True
    is_special = address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved
    is_special = is_special or address in _THIS_NETWORK or any(address in network for network in _SPECIAL)
    return address.is_private and not is_special
