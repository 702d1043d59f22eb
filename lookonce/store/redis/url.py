"""Redis URLs: parses the kind of deployment, the servers that know its topology, and the options of a connection.

    redis://, rediss://, unix://                                   one server; redis-py parses the rest
    redis+sentinel://[user:password@]host[:port][,…]/service[/db]  Sentinels, which know the service's primary
    redis+cluster://[user:password@]host[:port][,…]                some nodes of a cluster, which know all of them

`rediss+…` uses TLS to the nodes. User, password and options apply to the nodes. The options `sentinel_username`,
`sentinel_password` and `sentinel_ssl` apply to the Sentinels. This module opens no connection.
"""

from __future__ import annotations

import enum
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import redis.connection

from lookonce.errors import ConfigurationError

_SENTINEL_PORT = 26379
_NODE_PORT = 6379
_MAX_PORT = 65535
_SEVERAL_HOSTS = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://(?:(?P<credentials>[^/?#]*)@)?"
    r"(?P<hosts>[^/?#@]+)(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^:\[\]]+))(?::(?P<port>\d{1,5}))?")
_CLUSTER_PATHS = ("", "/", "/0")
# Options that would send every connection to the same server.
_PLACES = ("host", "port", "path", "unix_socket_path")
_SENTINEL_PREFIX = "sentinel_"


class Address(NamedTuple):
    """Host and port on which a server listens."""

    host: str
    port: int


class DeploymentKind(enum.Enum):
    """Kind of deployment, which decides how the server of a key is found."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL. Its `repr` contains no password."""

    kind: DeploymentKind
    # URL for redis-py with credentials, database and options of every node. It has host and port only for SINGLE.
    node_url: str = field(repr=False)
    # Servers that know the topology: Sentinels, or some nodes of the cluster. Empty for SINGLE.
    addresses: tuple[Address, ...] = ()
    # Name under which the Sentinels watch the primary. Empty unless SENTINEL.
    service: str = ""
    # URL for redis-py with credentials and options of `addresses`.
    seed_url: str = field(default="", repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Parses a URL of any kind; that of a SINGLE server is checked by its node only.

    Raises ConfigurationError, whose message does not contain the URL.
    """
    if not url.startswith(("redis+", "rediss+")):
        return RedisUrl(DeploymentKind.SINGLE, url)
    try:
        return _parse_several(url)
    except ValueError as error:
        raise unusable_url(error) from None


def unusable_url(error: Exception) -> ConfigurationError:
    """Returns the error for a URL that cannot be used. Its message lists the valid forms and leaves out the URL."""
    return ConfigurationError(
        "redis_url: cannot be used; expected redis://, rediss:// or unix://, redis+sentinel://host:port,…/service or "
        f"redis+cluster://host:port,… with options that redis-py knows ({type(error).__name__})"
    )


def checked_address(host: str, port: int) -> Address:
    """Returns the address. Raises ValueError for a host or port that no connection can be made to."""
    if not host or not 0 < port <= _MAX_PORT:
        raise ValueError("neither an empty host nor this port can be connected to")
    host.encode("idna")
    return Address(host, port)


def _parse_several(url: str) -> RedisUrl:
    match = _SEVERAL_HOSTS.fullmatch(url)
    if match is None:
        raise ValueError("not a Sentinel or cluster URL")
    kind = DeploymentKind(match["kind"])
    path, database, service = match["path"] or "", "0", ""
    if kind is DeploymentKind.SENTINEL:
        service, _, database = path.removeprefix("/").partition("/")
        service, database = urllib.parse.unquote(service), database.removesuffix("/") or "0"
        if not service or not database.isdecimal():
            raise ValueError("a Sentinel URL ends with /service or /service/database")
    elif path not in _CLUSTER_PATHS:
        raise ValueError("a cluster has database 0 only")
    credentials = "" if match["credentials"] is None else match["credentials"] + "@"
    query = dict(urllib.parse.parse_qsl(match["query"] or "", keep_blank_values=True))
    node_query = {name: value for name, value in query.items() if not _is_sentinel_option(name)}
    node_url = f"{match['scheme']}://{credentials}/{database}?{urllib.parse.urlencode(node_query)}"
    options = redis.connection.parse_url(node_url)
    if any(name in options for name in _PLACES) or (kind is DeploymentKind.CLUSTER and options.get("db")):
        raise ValueError("an option contradicts the rest of the URL")
    default_port = _SENTINEL_PORT if kind is DeploymentKind.SENTINEL else _NODE_PORT
    addresses = tuple(_parse_address(host, default_port) for host in match["hosts"].split(","))
    return RedisUrl(kind, node_url, addresses, service, _sentinel_url(query) if service else node_url)


def _parse_address(text: str, default_port: int) -> Address:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError("not host:port")
    return checked_address(match["bracketed"] or match["plain"], int(match["port"] or default_port))


def _is_sentinel_option(name: str) -> bool:
    return name.startswith(_SENTINEL_PREFIX)


def _sentinel_url(query: Mapping[str, str]) -> str:
    """Returns the URL with the Sentinels' own credentials and choice of TLS, and the certificates of the nodes."""
    own = {name.removeprefix(_SENTINEL_PREFIX): value for name, value in query.items() if _is_sentinel_option(name)}
    username, password = (urllib.parse.quote(own.pop(name, ""), safe="") for name in ("username", "password"))
    is_encrypted = redis.connection.to_bool(own.pop("ssl", "no"))
    if own:
        raise ValueError("there is no such Sentinel option")
    certificates = {name: value for name, value in query.items() if is_encrypted and name.startswith("ssl_")}
    scheme = "rediss" if is_encrypted else "redis"
    return f"{scheme}://{username}:{password}@/?{urllib.parse.urlencode(certificates)}"
