"""Checks the address of a server before a channel is opened, because gRPC takes almost any text for one.

There a port over 65535 loses its upper bits, a missing port is 443, and a URL is a host name that nobody finds.
"""

from __future__ import annotations

from lookonce.errors import ConfigurationError

_MAX_PORT = 65535
_EXAMPLE = "for example 127.0.0.1:50051"
# Schemes of gRPC whose addresses are its own matter. With those of the second line, each address needs a port.
_SCHEMES = frozenset({"dns", "unix", "unix-abstract", "vsock", "xds", "google-c2p"})
_IP_SCHEMES = frozenset({"ipv4", "ipv6"})


def checked_target(target: str) -> str:
    """Returns the target of a channel: host:port, or a gRPC target with a scheme, such as ipv4:HOST:PORT,HOST:PORT.

    Raises ConfigurationError for anything else.
    """
    if not target or not target.isprintable() or " " in target:
        raise ConfigurationError(f"the target must be host:port without spaces, {_EXAMPLE}; got {target!r}")
    scheme, _, rest = target.partition(":")
    if "://" in target and scheme not in _SCHEMES:
        raise ConfigurationError(f"the target must be host:port without {scheme}://, {_EXAMPLE}; got {target!r}")
    if scheme in _SCHEMES:
        return target
    addresses = rest.split(",") if scheme in _IP_SCHEMES else [target]
    if not all(map(_has_port, addresses)):
        raise ConfigurationError(
            f"the target must be host:port with a port of 1..{_MAX_PORT}, {_EXAMPLE}; got {target!r}"
        )
    return target


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    is_one_host = bool(host) and (":" not in host or host.endswith(("]", "%5D")))
    return is_one_host and port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= _MAX_PORT
