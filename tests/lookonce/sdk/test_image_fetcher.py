"""Images by URL come from listed hosts with public addresses only, in bounded time and size."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import pathlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trustme

import lookonce
from lookonce.errors import (
    ConfigurationError,
    DeadlineError,
    ImageTooLargeError,
    InvalidParameterError,
    LookonceError,
    UnavailableError,
)
from lookonce.sdk.public_addresses import is_private_network, is_public
from lookonce.testing import FakeServer
from tests.lookonce.sdk.web_server import PICTURE, Handler, WebServer, answer, picture


@pytest.fixture
def server() -> Iterator[WebServer]:
    with contextlib.closing(WebServer()) as running:
        yield running


@pytest.fixture
def fetcher(server: WebServer) -> lookonce.ImageFetcher:
    return lookonce.ImageFetcher([], private_hosts=[server.origin], max_bytes=100_000, timeout_s=20.0)


def failure_of(fetcher: lookonce.ImageFetcher, url: Any) -> LookonceError:
    with pytest.raises(LookonceError) as caught:
        fetcher.fetch(url)
    return caught.value


async def test_a_listed_host_gives_the_file(server: WebServer, fetcher: lookonce.ImageFetcher) -> None:
    server.paths["/a%20b.png?x=1&y=%C3%A9"] = picture()
    assert fetcher.fetch(server.url("/a b.png?x=1&y=é#part")) == PICTURE
    assert await fetcher.afetch(server.url("/a%20b.png?x=1&y=%C3%A9")) == PICTURE
    head = server.heads[0].decode().lower()
    assert f"host: localhost:{server.port}\r\n" in head
    assert "accept-encoding: identity" in head
    assert "authorization" not in head
    assert "cookie" not in head


@pytest.mark.parametrize("kind", ["image/jpeg", "IMAGE/WEBP; q=1", "application/octet-stream", "binary/octet-stream"])
def test_types_that_may_be_images(server: WebServer, fetcher: lookonce.ImageFetcher, kind: str) -> None:
    server.paths["/"] = picture(kind=kind)
    assert fetcher.fetch(server.url("")) == PICTURE


def test_chunks_and_an_answer_without_a_length(server: WebServer, fetcher: lookonce.ImageFetcher) -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(PICTURE[i : i + 999]), PICTURE[i : i + 999]) for i in range(0, 10248, 999))
    head = "HTTP/1.1 200 OK\nContent-Type: image/png"
    server.paths["/chunks"] = answer(f"{head}\nTransfer-Encoding: chunked", chunks + b"0\r\n\r\n")
    server.paths["/end"] = answer(head, PICTURE)
    assert fetcher.fetch(server.url("/chunks")) == PICTURE
    assert fetcher.fetch(server.url("/end")) == PICTURE


@pytest.mark.parametrize(
    ("handler", "error", "message"),
    [
        (picture(kind="text/html"), InvalidParameterError, "is no image: localhost says text/html"),
        (picture(kind="application/json"), InvalidParameterError, "is no image"),
        (picture(more="\nContent-Encoding: gzip"), InvalidParameterError, "compresses its answer"),
        (picture(b"x" * 100_001), ImageTooLargeError, "more than 100000 bytes"),
        (answer("HTTP/1.1 200 OK\nContent-Type: image/png", b"x" * 100_001), ImageTooLargeError, "more than 100000"),
        (answer("HTTP/1.1 200 OK\nContent-Type: image/png\nContent-Length: 50", b"x"), UnavailableError, "ended"),
        (
            answer("HTTP/1.1 200 OK\nContent-Type: image/png\nTransfer-Encoding: chunked", b"5\r\nab"),
            UnavailableError,
            "could not be asked",
        ),
        (picture(b""), InvalidParameterError, "sends an empty file"),
        (answer("HTTP/1.1 200 OK\nContent-Type: image/png"), InvalidParameterError, "sends an empty file"),
        (answer("HTTP/1.1 200 OK\nTransfer-Encoding: gzip, chunked", b"x"), UnavailableError, "encodes its answer"),
        (answer("HTTP/1.1 200 OK\nContent-Length: -5", b"x"), UnavailableError, "a length that is no number"),
        (answer("HTTP/1.1 200 OK\nContent-Length: 5x", b"x"), UnavailableError, "a length that is no number"),
        (answer("HTTP/1.1 404 Not Found\nContent-Type: image/png"), InvalidParameterError, "with the status 404"),
        (answer("HTTP/1.1 403 Forbidden"), InvalidParameterError, "with the status 403"),
        (answer("HTTP/1.1 429 Too Many Requests"), UnavailableError, "with the status 429"),
        (answer("HTTP/1.1 500 Internal Server Error"), UnavailableError, "with the status 500"),
        (answer("HTTP/1.1 206 Partial Content\nContent-Type: image/png", b"x"), UnavailableError, "status 206"),
        (answer("HTTP/1.1 204 No Content"), UnavailableError, "status 204"),
        (answer("220 mail.example.com ESMTP"), UnavailableError, "could not be asked"),
        (answer("HTTP/1.1 200 OK" + "\nx: y" * 200), UnavailableError, "could not be asked"),
        (answer("HTTP/1.1 200 OK\nx: " + "y" * 70_000), UnavailableError, "could not be asked"),
        (lambda connection, _: None, UnavailableError, "could not be asked"),
        (answer("HTTP/1.1 302 Found"), InvalidParameterError, "redirected more than 3 times"),
        (
            answer("HTTP/1.1 302 Found\nLocation: http://169.254.169.254/latest"),
            InvalidParameterError,
            "not fetched from",
        ),
        (answer("HTTP/1.1 302 Found\nLocation: file:///etc/passwd"), InvalidParameterError, "must begin with http"),
        (answer("HTTP/1.1 302 Found\nLocation: http://localhost:1/"), InvalidParameterError, "not fetched from"),
    ],
)
def test_answers_that_are_no_image(
    server: WebServer,
    fetcher: lookonce.ImageFetcher,
    handler: Handler,
    error: type[LookonceError],
    message: str,
) -> None:
    server.paths["/"] = handler
    found = failure_of(fetcher, server.url("/"))
    assert type(found) is error
    assert message in found.message


def test_redirections_within_the_list_are_followed(server: WebServer, fetcher: lookonce.ImageFetcher) -> None:
    for number in range(3):
        server.paths[f"/{number}"] = answer(f"HTTP/1.1 30{number + 1} Moved\nLocation: /{number + 1}")
    server.paths["/3"] = picture()
    assert fetcher.fetch(server.url("/0")) == PICTURE
    server.paths["/3"] = answer("HTTP/1.1 302 Found\nLocation: /4")
    assert "redirected more than 3 times" in str(failure_of(fetcher, server.url("/0")))


def drip(data: bytes) -> Handler:
    def send(connection: socket.socket, _: bytes) -> None:
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    return send


@pytest.mark.parametrize(
    "handler",
    [
        drip(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000),
        drip(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + b"x" * 1000),
        lambda connection, _: time.sleep(60),
    ],
)
def test_a_slow_server_gets_no_more_time(server: WebServer, handler: Handler) -> None:
    server.paths["/"] = handler
    fetcher = lookonce.ImageFetcher([], private_hosts=[server.origin], timeout_s=0.5)
    begin_s = time.monotonic()
    assert type(failure_of(fetcher, server.url("/"))) is DeadlineError
    assert time.monotonic() - begin_s < 20.0


async def test_slow_servers_take_no_time_from_other_calls() -> None:
    """All shared the event loop's six threads: 200 fetches of one second took 34, and calls with images waited."""
    ended = threading.Event()
    with contextlib.closing(WebServer()) as server, FakeServer("an answer") as decoder:

        def wait(*_: object) -> None:
            ended.wait()

        server.paths["/"] = wait
        fetcher = lookonce.ImageFetcher([], private_hosts=[server.origin], timeout_s=60.0)
        fetches = [asyncio.create_task(fetcher.afetch(server.url("/"))) for _ in range(100)]
        others = [asyncio.create_task(asyncio.to_thread(ended.wait)) for _ in range(40)]
        try:
            async with lookonce.AsyncClient.connect(decoder.target) as client:
                assert (await client.generate("hello", [b"a picture"])).text == "an answer"
            assert not any(task.done() for task in fetches)
        finally:
            ended.set()
        found = await asyncio.gather(*fetches, return_exceptions=True)
        assert {type(one) for one in found} == {UnavailableError}
        await asyncio.gather(*others)


async def test_the_wait_for_a_thread_counts() -> None:
    """With 64 threads, 36 of these 100 fetches wait for one."""
    with contextlib.closing(WebServer()) as server:
        server.paths["/"] = lambda *_: time.sleep(60)
        fetcher = lookonce.ImageFetcher([], private_hosts=[server.origin], timeout_s=0.5)
        fetches = [asyncio.create_task(fetcher.afetch(server.url("/"))) for _ in range(100)]
        found = await asyncio.gather(*fetches, return_exceptions=True)
        assert {type(one) for one in found} == {DeadlineError}


async def test_a_fetch_that_is_cancelled_ends_its_connection() -> None:
    """Its thread went on to the deadline, and 64 of them kept all others waiting."""
    ended = threading.Event()

    def drip(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.01)
        ended.set()

    with contextlib.closing(WebServer()) as server:
        server.paths["/"] = drip
        fetcher = lookonce.ImageFetcher([], private_hosts=[server.origin], timeout_s=100.0)
        fetching = asyncio.create_task(fetcher.afetch(server.url("/")))
        while not server.heads:
            await asyncio.sleep(0.01)
        fetching.cancel()
        assert await asyncio.to_thread(ended.wait, 60)


async def test_a_deadline_holds_while_all_readers_are_busy() -> None:
    ended = threading.Event()

    class Slow:
        def read(self) -> bytes:
            ended.wait()
            return b"a picture"

    with FakeServer("an answer") as server:
        try:
            async with lookonce.AsyncClient.connect(server.target) as client:
                calls = [client.generate("hello", [Slow()], timeout_s=0.3) for _ in range(40)]
                found = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(one) for one in found} == {DeadlineError}
        finally:
            ended.set()


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def look_up(*_: object, **__: object) -> list[Any]:
        ended.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        assert type(failure_of(lookonce.ImageFetcher(["*"], timeout_s=0.2), "http://example.com/")) is DeadlineError
    finally:
        ended.set()


@pytest.fixture
def trusted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return authority


def secure_server(authority: trustme.CA, name: str) -> WebServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return WebServer(context)


def test_https_checks_the_name(trusted: trustme.CA) -> None:
    with contextlib.closing(secure_server(trusted, "localhost")) as server:
        server.paths["/"] = picture()
        fetcher = lookonce.ImageFetcher([], private_hosts=[server.origin])
        assert fetcher.fetch(server.url("/")) == PICTURE
        server.paths["/"] = answer(f"HTTP/1.1 302 Found\nLocation: http://{server.origin}/")
        assert "redirected from https to http" in str(failure_of(fetcher, server.url("/")))
    for authority, name in ((trusted, "other.example.com"), (trustme.CA(), "localhost")):
        with contextlib.closing(secure_server(authority, name)) as server:
            fetcher = lookonce.ImageFetcher([], private_hosts=[server.origin])
            assert "SSLCertVerificationError" in str(failure_of(fetcher, server.url("/")))


def test_a_slow_server_gets_no_more_time_by_tls(trusted: trustme.CA) -> None:
    with contextlib.closing(secure_server(trusted, "localhost")) as server:
        server.paths["/"] = drip(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + b"x" * 1000)
        fetcher = lookonce.ImageFetcher([], private_hosts=[server.origin], timeout_s=0.5)
        assert type(failure_of(fetcher, server.url("/"))) is DeadlineError


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Stands in for DNS: the addresses of each name. Connections are noted in "connected" and refused."""
    known: dict[str, list[str]] = {"connected": []}

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host]]

    def connect(address: tuple[str, int], **_: Any) -> socket.socket:
        known["connected"].append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    return known


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "fd00::1", "::1", "100.64.0.1",
]  # fmt: skip
NEVER = [
    "169.254.169.254", "0.0.0.0", "0.1.2.3", "224.0.0.1", "240.0.0.1", "255.255.255.255", "fe80::1", "::", "ff02::1",
    "::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::1", "192.0.0.8", "fec0::2", "168.63.129.16",
]  # fmt: skip
ALSO_NOT_PUBLIC = [
    "::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::10.0.0.1", "2002:0a00:0001::", "2001:db8::1", "192.0.2.1", "198.18.0.1",
    "203.0.113.5", "2001:0:0a00:0001::1", "3fff::1", "192.88.99.1", "4000::1",
]  # fmt: skip
PUBLIC = ["93.184.215.14", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::8.8.8.8"]


def test_which_addresses_are_public() -> None:
    for text in (*PRIVATE, *NEVER, *ALSO_NOT_PUBLIC):
        assert not is_public(ipaddress.ip_address(text)), text
    for text in PUBLIC:
        assert is_public(ipaddress.ip_address(text)), text
        assert not is_private_network(ipaddress.ip_address(text)), text
    for text in PRIVATE:
        assert is_private_network(ipaddress.ip_address(text)), text
    for text in NEVER:
        assert not is_private_network(ipaddress.ip_address(text)), text


@pytest.mark.parametrize("address", [*PRIVATE, *NEVER, *ALSO_NOT_PUBLIC])
def test_a_listed_name_with_another_address_is_not_connected_to(names: dict[str, list[str]], address: str) -> None:
    names["pictures.example.com"] = ["8.8.8.8", address]
    for hosts in (["pictures.example.com"], ["*.example.com"], ["*"]):
        found = failure_of(lookonce.ImageFetcher(hosts), "http://pictures.example.com/cat.png")
        assert "is no host of the public internet" in found.message
    assert not names["connected"]


@pytest.mark.parametrize("address", NEVER)
def test_a_private_host_is_not_link_local(names: dict[str, list[str]], address: str) -> None:
    names["store.internal"] = [address]
    fetcher = lookonce.ImageFetcher([], private_hosts=["store.internal"])
    assert "is no host of the public internet" in failure_of(fetcher, "http://store.internal/").message
    assert not names["connected"]


def test_each_address_is_looked_up_once_and_tried(names: dict[str, list[str]]) -> None:
    """A second look-up could give another answer."""
    names["pictures.example.com"] = ["2606:2800:220:1:248:1893:25c8:1946", "8.8.8.8", "8.8.8.8"]
    found = failure_of(lookonce.ImageFetcher(["pictures.example.com"]), "https://pictures.example.com/")
    assert isinstance(found, UnavailableError)
    assert names["connected"] == ["8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946"]


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.com/", "http://example.com.evil.com/", "http://evilexample.com/", "http://example.com:8080/",
        "http://sub.example.com/", "http://sub.example.org:443/", "http://example.org/", "http://2130706433/",
        "http://0x7f000001/", "http://[::1]/", "https://example.com:80/",
    ],
)  # fmt: skip
def test_other_hosts_are_refused_before_a_look_up(names: dict[str, list[str]], url: str) -> None:
    fetcher = lookonce.ImageFetcher(["example.com", "*.example.org"])
    assert "images are not fetched from" in failure_of(fetcher, url).message


@pytest.mark.parametrize(
    "url",
    [
        "http://EXAMPLE.com/", "http://example.com./a", "https://example.com:443/", "http://example.com:80/",
        "http://a.example.org/", "http://a.b.example.org/", "http://bücher.example.org/", "http://example.net:8080/",
    ],
)  # fmt: skip
def test_listed_hosts_are_looked_up(names: dict[str, list[str]], url: str) -> None:
    fetcher = lookonce.ImageFetcher(["example.com", "*.example.org", "Example.net:8080"])
    for name in ("example.com", "a.example.org", "a.b.example.org", "xn--bcher-kva.example.org", "example.net"):
        names[name] = ["8.8.8.8"]
    assert isinstance(failure_of(fetcher, url), UnavailableError)
    assert names["connected"] == ["8.8.8.8"]


def test_a_star_with_a_port_means_that_port(names: dict[str, list[str]]) -> None:
    names["example.com"] = ["8.8.8.8"]
    fetcher = lookonce.ImageFetcher(["*:8099"])
    assert isinstance(failure_of(fetcher, "http://example.com:8099/"), UnavailableError)
    for url in ("http://example.com/", "http://example.com:80990/", "http://example.com:9/"):
        assert isinstance(failure_of(fetcher, url), InvalidParameterError)
    assert names["connected"] == ["8.8.8.8"]


def test_a_star_means_usual_ports_only(names: dict[str, list[str]]) -> None:
    assert "images are not fetched from" in failure_of(lookonce.ImageFetcher(["*"]), "http://example.com:6379/").message


@pytest.mark.parametrize(
    "url",
    [
        "", "cat.png", "ftp://example.com/", "file:///etc/passwd", "http://", "http:///a", "http://user@example.com/",
        "http://example.com@evil.com/", "http://example.com:99999/", "http://exa mple.com/", "http://example.com\\@evil/",
        "http://example.com/\nHost: evil", "http://*/", "http://ex*mple.com/", "http://example.com/" + "a" * 9000,
        "http://[::1", "javascript:alert(1)", "http://example.com:port/", 5, b"http://example.com/",
    ],
)  # fmt: skip
def test_what_is_no_url_of_an_image(url: Any) -> None:
    assert type(failure_of(lookonce.ImageFetcher(["*", "example.com"]), url)) is InvalidParameterError


@pytest.mark.parametrize(
    "arguments",
    [
        {"hosts": "example.com"}, {"hosts": ["http://example.com"]}, {"hosts": [""]}, {"hosts": ["a b"]},
        {"hosts": [5]}, {"hosts": ["*.*"]}, {"hosts": ["example.*"]}, {"hosts": ["example.com:0"]},
        {"hosts": ["example.com:70000"]},
        {"hosts": ["example.com/a"]}, {"hosts": [], "private_hosts": ["*"]}, {"hosts": [], "private_hosts": ["*.a"]},
    ],
)  # fmt: skip
def test_lists_that_no_host_could_match(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        lookonce.ImageFetcher(**arguments)


@pytest.mark.parametrize("arguments", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"timeout_s": 0}, {"timeout_s": "1"}])
def test_bad_limits(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        lookonce.ImageFetcher(["example.com"], **arguments)


def test_proxies_of_the_environment_are_not_used(
    server: WebServer, fetcher: lookonce.ImageFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.paths["/"] = picture()
    assert fetcher.fetch(server.url("/")) == PICTURE
