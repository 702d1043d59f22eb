"""Fetches images from web servers, for programs whose users send URLs. The services themselves fetch nothing.

A URL is a request that a stranger makes in the name of this program (OWASP, Server-Side Request Forgery). So the host
must be on a list, its addresses must be public, the connection goes to one of the addresses that were checked, each
redirection is checked in the same way, and time and size have limits. No proxy, cookie or credential is used.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from lookonce.errors import (
    ConfigurationError,
    DeadlineError,
    ImageTooLargeError,
    InvalidParameterError,
    UnavailableError,
)
from lookonce.sdk.connection.channel import Deadline
from lookonce.sdk.in_threads import run_until
from lookonce.sdk.public_addresses import (
    Address,
    UnknownHostError,
    addresses_of,
    is_private_network,
    is_public,
)

_FIELD = "image_url"
_PORTS = {"http": 80, "https": 443}
_MAX_REDIRECTS = 3
_MAX_FETCHES = 64
_MAX_URL_CHARACTERS = 8192
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Statuses that say that there is no such image for us. Asking again does not help.
_CALLERS_FAULTS = frozenset({400, 401, 402, 403, 404, 405, 406, 410, 414, 451})
_CHUNK_BYTES = 64 << 10
_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]|\*")
_PORT = re.compile(r":\d{1,5}$", re.ASCII)
# Servers of files often do not know better. Whether it is an image, its decoder says.
_UNSPECIFIC_TYPES = frozenset({"", "application/octet-stream", "binary/octet-stream"})


@dataclass(frozen=True, slots=True)
class _Place:
    """The parts of a URL that decide whether and where it may be fetched."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


class ImageFetcher:
    """Fetches images by http and https from certain hosts. Thread-safe.

    Fetched images are given to a client like any other:

        with lookonce.Client.connect(target) as client:
            fetcher = lookonce.ImageFetcher(["images.example.com", "*.cdn.example.com"])
            client.generate("What is it?", images=[fetcher.fetch(url)])
    """

    def __init__(
        self,
        hosts: Iterable[str],
        *,
        private_hosts: Iterable[str] = (),
        max_bytes: int = 20_000_000,
        timeout_s: float = 10.0,
    ) -> None:
        """`hosts` are names, `*.` names for all below a name, or `*` for all; with a port unless it is the scheme's.

        `private_hosts` are exact names, with a port likewise, whose addresses may be private or of this machine, for
        example an object store. Link-local addresses are never used. An image has at most `max_bytes`, and `timeout_s`
        is the time for all of it, redirections included.

        Raises ConfigurationError for names that no URL could have, InvalidParameterError for a bad limit.
        """
        self._hosts = _checked_hosts("hosts", hosts)
        self._private_hosts = _checked_hosts("private_hosts", private_hosts)
        if any("*" in host for host in self._private_hosts):
            raise ConfigurationError("private_hosts: name each private host; a pattern could stand for any")
        given: object = max_bytes
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise InvalidParameterError("max_bytes", f"must be a whole number from 1, got {given!r}")
        Deadline.after(timeout_s)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context()
        # Slow servers take no thread from the caller's other work. A thread begins with the first fetch that needs it.
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="lookonce-image-urls")

    def fetch(self, url: str) -> bytes:
        """Returns the bytes of the image at a URL.

        Raises InvalidParameterError for a URL that may not be fetched, for an image that is not there and for what is
        no image, ImageTooLargeError, UnavailableError if the server cannot be reached or fails, and DeadlineError.
        """
        return self._fetch(url, Deadline.after(self._timeout_s), _Abort())

    async def afetch(self, url: str) -> bytes:
        """Returns the bytes of the image at a URL, as `fetch`. At most 64 are fetched at the same time; others wait.

        Cancelling the task ends the connection.
        """
        deadline, abort = Deadline.after(self._timeout_s), _Abort()
        try:
            return await run_until(deadline, self._threads, self._fetch, url, deadline, abort)
        finally:
            abort.set()

    def _fetch(self, url: str, deadline: Deadline, abort: _Abort) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            place = self._checked(url)
            with self._answer(place, deadline, abort) as answer:
                if answer.status not in _REDIRECTS:
                    content = self._content(place, answer)
                    deadline.remaining_s()
                    return content
                url = urllib.parse.urljoin(url, answer.headers.get("Location", ""))
            if place.scheme == "https" and not url.startswith("https:"):
                raise InvalidParameterError(_FIELD, "is redirected from https to http")
        raise InvalidParameterError(_FIELD, f"is redirected more than {_MAX_REDIRECTS} times")

    def _checked(self, url: str) -> _Place:
        place = _place_of(url)
        is_listed = place.origin in self._private_hosts or any(_matches(place.origin, one) for one in self._hosts)
        if not is_listed:
            raise InvalidParameterError(_FIELD, f"images are not fetched from {place.origin}")
        return place

    def _addresses(self, place: _Place, deadline: Deadline) -> list[Address]:
        is_private_host = place.origin in self._private_hosts
        try:
            found = addresses_of(place.host.strip("[]"), place.port, deadline)
        except UnknownHostError:
            if is_private_host:
                raise UnavailableError(f"the host {place.host} has no address") from None
            # Whether a private network has the name is not for the caller to learn.
            found = []
        # All of them: one that is no public address shows that somebody plays with the name.
        if not found or not all(is_public(one) or (is_private_host and is_private_network(one)) for one in found):
            raise InvalidParameterError(_FIELD, f"{place.host} is no host of the public internet")
        return found

    @contextmanager
    def _answer(self, place: _Place, deadline: Deadline, abort: _Abort) -> Iterator[http.client.HTTPResponse]:
        """Sends a request and yields the head of its answer."""
        with (
            _failures(place, deadline),
            closing(self._connected(place, deadline)) as opened,
            abort.ending(opened),
            _ended_at(deadline, opened),
        ):
            connection = http.client.HTTPConnection(place.host, place.port)
            connection.sock = opened
            connection.putrequest("GET", place.path, skip_host=True, skip_accept_encoding=True)
            for name, value in (
                ("Host", place.origin),
                ("User-Agent", "lookonce"),
                ("Accept", "image/*"),
                ("Accept-Encoding", "identity"),
                ("Connection", "close"),
            ):
                connection.putheader(name, value)
            connection.endheaders()
            with connection.getresponse() as answer:
                yield answer

    def _connected(self, place: _Place, deadline: Deadline) -> socket.socket:
        """Connects to the first address that takes the connection."""
        failure: OSError | None = None
        for address in self._addresses(place, deadline):
            try:
                plain = socket.create_connection((str(address), place.port), timeout=deadline.remaining_s())
            except OSError as error:
                failure = error
                continue
            if place.scheme == "http":
                return plain
            try:
                # It covers the whole handshake.
                plain.settimeout(deadline.remaining_s())
                return self._tls.wrap_socket(plain, server_hostname=place.host.strip("[]"))
            except BaseException:
                plain.close()
                raise
        assert failure is not None, "a host without addresses is refused earlier"
        raise failure

    def _content(self, place: _Place, answer: http.client.HTTPResponse) -> bytes:
        if answer.status != http.client.OK:
            text = f"{place.host} answered with the status {answer.status}, not with an image"
            if answer.status in _CALLERS_FAULTS:
                raise InvalidParameterError(_FIELD, text)
            raise UnavailableError(text)
        kind = answer.headers.get_content_type() if "Content-Type" in answer.headers else ""
        if not kind.startswith("image/") and kind not in _UNSPECIFIC_TYPES:
            raise InvalidParameterError(_FIELD, f"is no image: {place.host} says {kind}")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise InvalidParameterError(_FIELD, f"{place.host} compresses its answer, though it was asked not to")
        if answer.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
            raise UnavailableError(f"{place.host} encodes its answer in a way that was not asked for")
        stated = answer.headers.get("Content-Length", "0")
        if not (stated.isascii() and stated.isdecimal()):
            raise UnavailableError(f"{place.host} states a length that is no number")
        if int(stated) > self._max_bytes:
            raise self._too_large(place)
        chunks: list[bytes] = []
        num_bytes = 0
        while chunk := answer.read1(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise self._too_large(place)
            chunks.append(chunk)
        if answer.length:
            raise UnavailableError(f"{place.host} ended its answer early")
        if not chunks:
            raise InvalidParameterError(_FIELD, f"is no image: {place.host} sends an empty file")
        return b"".join(chunks)

    def _too_large(self, place: _Place) -> ImageTooLargeError:
        return ImageTooLargeError(f"the image at {place.host} has more than {self._max_bytes} bytes")


class _Abort:
    """Ends the connection of a fetch for which nobody waits any more. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._connection: socket.socket | None = None

    def set(self) -> None:
        """Ends the connection, and each later one of the same fetch."""
        with self._lock:
            self._is_set = True
            if self._connection is not None:
                _shut_down(self._connection)

    @contextmanager
    def ending(self, connection: socket.socket) -> Iterator[None]:
        """Lets `set` end a connection until the end of the block."""
        with self._lock:
            self._connection = connection
            if self._is_set:
                _shut_down(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        # The method of a TLS socket would let its reader take encrypted bytes for the answer.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@contextmanager
def _ended_at(deadline: Deadline, connection: socket.socket) -> Iterator[None]:
    """Ends a connection at the deadline. A socket's own time limit begins anew with each byte that arrives."""
    connection.settimeout(None)
    remaining_s = deadline.remaining_s()
    if remaining_s is None:
        yield
        return

    timer = threading.Timer(remaining_s, _shut_down, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _failures(place: _Place, deadline: Deadline) -> Iterator[None]:
    """Turns the errors of sockets, TLS and HTTP into those of the SDK."""
    try:
        yield
    except (OSError, http.client.HTTPException, UnavailableError) as error:
        if deadline.has_passed():
            raise DeadlineError(f"{place.host} did not send the image in time") from None
        if isinstance(error, UnavailableError):
            raise
        raise UnavailableError(f"{place.host} could not be asked for the image: {type(error).__name__}") from None


def _place_of(url: str) -> _Place:
    """Raises InvalidParameterError for a URL that is none, or has parts that no image needs."""
    given: object = url
    if not isinstance(given, str) or len(given) > _MAX_URL_CHARACTERS or not given.isprintable() or "\\" in given:
        raise InvalidParameterError(_FIELD, f"must be a URL of at most {_MAX_URL_CHARACTERS} printable characters")
    try:
        parts = urllib.parse.urlsplit(given.strip())
        port = parts.port
    except ValueError:
        raise InvalidParameterError(_FIELD, "is no URL") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidParameterError(_FIELD, "must begin with http:// or https:// and have a host")
    if "@" in parts.netloc:
        raise InvalidParameterError(_FIELD, "must not have a user or a password")
    host = parts.hostname.rstrip(".")
    try:
        host = f"[{host}]" if ":" in host else host.encode("idna").decode()
    except UnicodeError:
        raise InvalidParameterError(_FIELD, "has a host that is no name") from None
    if not _HOST.fullmatch(host) or "*" in host:
        raise InvalidParameterError(_FIELD, "has a host that is no name")
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=-._~")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=-._~?[]")
    chosen_port = _PORTS[parts.scheme] if port is None else port
    return _Place(parts.scheme, host, chosen_port, f"{path}?{query}" if query else path)


def _checked_hosts(name: str, hosts: Iterable[str]) -> frozenset[str]:
    """Returns hosts in lower case. Raises ConfigurationError for a text in place of a list, and for what is no host."""
    given: object = hosts
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{name} must be a list of hosts")
    checked = set()
    for host in given:
        text = host.lower() if isinstance(host, str) else ""
        bare, _, port = text.rpartition(":") if _PORT.search(text) else (text, "", "")
        if not _HOST.fullmatch(bare) or (port and not 1 <= int(port) <= 65535):
            raise ConfigurationError(
                f"{name}: {host!r} is no host; write it like images.example.com or *.example.com:8080"
            )
        checked.add(text)
    return frozenset(checked)


def _matches(origin: str, pattern: str) -> bool:
    """Whether a host, with its port if it is no scheme's, is one of a pattern's."""
    if pattern == "*":
        # All hosts, but not all services of a host: with other ports a URL could speak to databases.
        return not _PORT.search(origin)
    if pattern.startswith("*:"):
        return origin.endswith(pattern[1:])
    if pattern.startswith("*."):
        return origin.endswith(pattern[1:]) and len(origin) > len(pattern) - 1
    return origin == pattern
