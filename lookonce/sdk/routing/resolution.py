"""The addresses of the replicas behind a client's target."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass, field

from lookonce.sdk.connection.target import is_on_this_machine

# With more replicas than these, a connection of each client to each of them would be too many.
_MAX_REPLICAS = 64
# Variables that name a proxy for gRPC.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_DNS = "dns:///"


@dataclass(frozen=True, slots=True)
class Resolution:
    """A target that may stand for several replicas."""

    # The replicas where the target lists them.
    listed: tuple[str, ...] = ()
    # Otherwise the name that DNS knows, and its port.
    host: str = ""
    port: int = field(default=0, kw_only=True)

    @property
    def authority(self) -> str | None:
        """The name by which servers know themselves; None for listed addresses, each of which is its own."""
        return f"{self.host}:{self.port}" if self.host else None

    def addresses(self) -> tuple[str, ...]:
        """Returns the replicas' addresses, sorted: IP:port. Asks the name server and may take long.

        Empty for more replicas than a client should connect to one by one. Raises OSError if the name is not known.
        """
        found = set(self.listed)
        if self.host:
            infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            found = {_joined(str(info[4][0]), self.port) for info in infos}
        return tuple(sorted(found)) if len(found) <= _MAX_REPLICAS else ()


def resolution_of(target: str) -> Resolution | None:
    """Returns how to find the replicas behind a checked target; None if it stands for one server, or only gRPC knows.

    The addresses of "localhost" are those of one server. Where the environment names a proxy, gRPC alone knows which
    names and addresses are reached without it.
    """
    if any(os.environ.get(name) for name in _PROXIES) and not is_on_this_machine(target):
        return None
    scheme, _, rest = target.partition(":")
    if scheme in ("ipv4", "ipv6"):
        listed = tuple(address.replace("%5B", "[").replace("%5D", "]") for address in rest.split(","))
        return Resolution(listed) if len(listed) > 1 else None
    if target.startswith("dns:") and not target.startswith(_DNS):
        target = target.removeprefix("dns:")
        if target.startswith("//"):
            # It names its own name server.
            return None
    target = target.removeprefix(_DNS)
    host, _, port = target.rpartition(":")
    if not port.isdecimal() or "/" in host or _is_ip(host) or is_on_this_machine(target):
        return None
    return Resolution(host=host, port=int(port))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.replace("%5B", "[").replace("%5D", "]").strip("[]"))
    except ValueError:
        return False
    return True


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
