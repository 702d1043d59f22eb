"""What a Redis URL says: which deployment, where it is asked for its nodes, and how one connects to a node.

    redis://, rediss://, unix://                                   one server; redis-py reads the rest
    redis+sentinel://[user:password@]host[:port][,…]/service[/db]  Sentinels, who know the service's primary
    redis+cluster://[user:password@]host[:port][,…]                some nodes of a cluster, who know all of them

`rediss+…` speaks TLS to the nodes. User, password and options are those of the nodes; what Sentinels want stands in
`sentinel_username`, `sentinel_password` and `sentinel_ssl`. Connects to nothing.
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
# Would send every connection to one place.
_PLACES = ("host", "port", "path", "unix_socket_path")
_SENTINEL_PREFIX = "sentinel_"


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


class DeploymentKind(enum.Enum):
    """How it comes out which server has a key."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL that was read. Its `repr` tells no password."""

    kind: DeploymentKind
    # For redis-py: credentials, database and options of every node; host and port only of a SINGLE one.
    node_url: str = field(repr=False)
    # Who is asked for the nodes: Sentinels, or some nodes of the cluster; none for SINGLE.
    addresses: tuple[Address, ...] = ()
    # What the Sentinels call the primary and its replicas.
    service: str = ""
    # For redis-py: credentials and options of `addresses`.
    seed_url: str = field(default="", repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Raises ConfigurationError, which never tells the URL. A SINGLE one is not looked into."""
    if not url.startswith(("redis+", "rediss+")):
        return RedisUrl(DeploymentKind.SINGLE, url)
    try:
        return _parse_several(url)
    except ValueError as error:
        raise unusable_url(error) from None


def unusable_url(error: Exception) -> ConfigurationError:
    """Says what URLs there are, and no word of this one."""
    return ConfigurationError(
        "redis_url: cannot be used; expected redis://, rediss:// or unix://, redis+sentinel://host:port,…/service or "
        f"redis+cluster://host:port,… with options that redis-py knows ({type(error).__name__})"
    )


def checked_address(host: str, port: int) -> Address:
    """Raises ValueError for what no connection can be made to, whoever said it."""
    if not host or not 0 < port <= _MAX_PORT:
        raise ValueError("neither an empty host nor this port can be connected to")
    host.encode("idna")
    return Address(host, port)


def _parse_several(url: str) -> RedisUrl:
    match = _SEVERAL_HOSTS.fullmatch(url)
    if match is None:
        raise ValueError("not a URL of several hosts")
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
    node_query = {name: value for name, value in query.items() if not _is_of_sentinel(name)}
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


def _is_of_sentinel(name: str) -> bool:
    return name.startswith(_SENTINEL_PREFIX)


def _sentinel_url(query: Mapping[str, str]) -> str:
    """Certificates are the nodes'; credentials, and whether there is TLS at all, are the Sentinels' own."""
    own = {name.removeprefix(_SENTINEL_PREFIX): value for name, value in query.items() if _is_of_sentinel(name)}
    username, password = (urllib.parse.quote(own.pop(name, ""), safe="") for name in ("username", "password"))
    is_encrypted = redis.connection.to_bool(own.pop("ssl", "no"))
    if own:
        raise ValueError("no such option of Sentinels")
    certificates = {name: value for name, value in query.items() if is_encrypted and name.startswith("ssl_")}
    scheme = "rediss" if is_encrypted else "redis"
    return f"{scheme}://{username}:{password}@/?{urllib.parse.urlencode(certificates)}"
