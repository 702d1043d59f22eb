"""Checks the address of a server before a channel is opened, because gRPC takes almost any text for one.

There a port over 65535 loses its upper bits, a missing port is 443, and a URL is a host name that nobody finds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TypeAlias

from lookonce.errors import ConfigurationError

Target: TypeAlias = "str | Sequence[str]"
"""The target of a channel: host:port, a gRPC target with a scheme, or a list of IP addresses with ports."""

_MAX_PORT = 65535
_EXAMPLE = "for example 127.0.0.1:50051"
# Schemes of gRPC whose addresses are its own matter.
_SCHEMES = frozenset({"unix", "unix-abstract", "vsock", "xds", "google-c2p"})
# Schemes whose addresses need a port.
_IP_SCHEMES = frozenset({"ipv4", "ipv6"})
_DNS_SCHEME = "dns"
_LOCAL_SCHEMES = frozenset({"unix", "unix-abstract"})


def checked_target(target: Target) -> str:
    """Returns the target of a channel: host:port, or a gRPC target with a scheme, such as ipv4:HOST:PORT,HOST:PORT.

    A list of IP addresses with ports becomes such a target; calls are balanced over them. Raises ConfigurationError for
    anything else.
    """
    if isinstance(target, list | tuple) and all(isinstance(one, str) for one in target):
        return _joined(target)
    given: object = target
    if not isinstance(given, str):
        raise ConfigurationError(f"the target must be a text such as 127.0.0.1:50051; got {given!r}")
    target = given
    if not target or not target.isprintable() or " " in target:
        raise ConfigurationError(f"the target must be host:port without spaces, {_EXAMPLE}; got {target!r}")
    scheme, _, rest = target.partition(":")
    if "://" in target and scheme not in _SCHEMES | {_DNS_SCHEME}:
        raise ConfigurationError(f"the target must be host:port without {scheme}://, {_EXAMPLE}; got {target!r}")
    if scheme in _SCHEMES:
        if not rest.strip("/"):
            raise ConfigurationError(f"the target has nothing after {scheme}:; got {target!r}")
        return target
    if not all(map(_has_port, _addresses(target, scheme, rest))):
        raise ConfigurationError(
            f"the target must be host:port with a port of 1..{_MAX_PORT}, {_EXAMPLE}; got {target!r}"
        )
    return target


def is_on_this_machine(target: str) -> bool:
    """Whether a checked target has servers on this machine only, as its text says.

    Of names, only "localhost" counts, for which gRPC asks no name server. It asks one for "localhost." with a dot.
    """
    scheme, _, rest = target.partition(":")
    if scheme in _SCHEMES:
        return scheme in _LOCAL_SCHEMES
    if scheme == _DNS_SCHEME and rest.startswith("//") and not rest.startswith("///"):
        # It names its own name server.
        return False
    return all(map(_is_loopback, _addresses(target, scheme, rest)))


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _joined(targets: Sequence[str]) -> str:
    """Raises ConfigurationError unless all are IP addresses of one version with ports."""
    checked = [checked_target(target) for target in targets]
    if len(checked) == 1:
        return checked[0]
    versions = {_ip_version(target) for target in checked}
    if versions in ({4}, {6}):
        return f"ipv{versions.pop()}:{','.join(checked)}"
    raise ConfigurationError(
        "a list of targets must have IP addresses of one version, for example 10.0.0.1:50051 and 10.0.0.2:50051; "
        f"a name stands for all addresses that DNS has for it; got {targets!r}"
    )


def _ip_version(target: str) -> int | None:
    """Returns 4 or 6 for an IP address with a port; None for anything else."""
    try:
        return ipaddress.ip_address(target.rpartition(":")[0].strip("[]")).version
    except ValueError:
        return None


def _addresses(target: str, scheme: str, rest: str) -> list[str]:
    """Returns the addresses in a target, each of which needs a port."""
    if scheme in _IP_SCHEMES:
        return rest.split(",")
    if scheme == _DNS_SCHEME:
        # A name server may stand between two slashes and a third one.
        return [rest.partition("//")[2].partition("/")[2] if rest.startswith("//") else rest]
    return [target]


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    is_one_host = bool(host) and (":" not in host or host.endswith(("]", "%5D")))
    return is_one_host and port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= _MAX_PORT
