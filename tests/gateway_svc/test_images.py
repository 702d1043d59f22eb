"""Images by URL are fetched for callers with a key that the decoder accepts, from listed hosts, in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from lookonce.errors import UnauthenticatedError
from lookonce.testing import FakeServer
from tests.gateway_svc.gateways import PICTURE, running_gateway
from tests.lookonce.sdk.web_server import WebServer, picture

PATH = "/v1/chat/completions"


@pytest.fixture
def web() -> Iterator[WebServer]:
    with contextlib.closing(WebServer()) as running:
        running.paths["/a.png"] = picture(PICTURE)
        yield running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer("a red square") as running:
        yield running


def asked(*urls: str, **options: Any) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url, **options}} for url in urls]
    return json.dumps({"model": "fake", "messages": [{"role": "user", "content": parts}]}).encode()


def code_of(answer: tuple[int, bytes]) -> tuple[int, str]:
    return answer[0], json.loads(answer[1])["error"]["code"]


async def test_an_image_of_a_listed_host_is_fetched_once_a_request(web: WebServer, server: FakeServer) -> None:
    async with running_gateway(server.target, private_image_hosts=f" {web.origin} ,other.example.com") as gateway:
        url = web.url("/a.png")
        assert (await gateway.post(PATH, asked(url, url, url)))[0] == 200
        assert [image.data for image in server.requests[-1].images] == [PICTURE] * 3
        assert len(web.heads) == 1
        assert (await gateway.post(PATH, asked(url, detail="low")))[0] == 200
        assert server.requests[-1].images[0].max_pixels == 512 * 512
        assert gateway.endpoints._buffers.num_bytes == 0


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:1/", (400, "INVALID_PARAMETER")),
        ("https://images.example.com/", (400, "INVALID_PARAMETER")),
        ("http://169.254.169.254/latest/meta-data", (400, "INVALID_PARAMETER")),
        ("ftp://localhost/", (400, "INVALID_PARAMETER")),
        ("{web}/missing", (400, "INVALID_PARAMETER")),
        ("{web}/large.png", (400, "IMAGE_TOO_LARGE")),
    ],
)
async def test_other_images_are_refused(
    web: WebServer, server: FakeServer, url: str, expected: tuple[int, str]
) -> None:
    web.paths["/large.png"] = picture(b"x" * 3000)
    web.paths["/missing"] = lambda connection, _: connection.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")
    async with running_gateway(server.target, private_image_hosts=web.origin, max_image_bytes=2000) as gateway:
        asking = asked(url.replace("{web}", web.url("")))
        assert code_of(await gateway.post(PATH, asking)) == expected
    assert not server.requests


async def test_without_hosts_nothing_is_fetched(web: WebServer, server: FakeServer) -> None:
    async with running_gateway(server.target) as gateway:
        status, answer = await gateway.post(PATH, asked(web.url("/a.png")))
    assert status == 400
    assert "fetches no images" in json.loads(answer)["error"]["message"]
    assert not web.heads


async def test_nothing_is_fetched_and_no_large_body_read_without_an_accepted_key(
    web: WebServer, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lookonce import AsyncClient

    async def refused(self: AsyncClient, **_: object) -> None:
        raise UnauthenticatedError("the bearer token is not accepted")

    monkeypatch.setattr(AsyncClient, "load", refused)
    async with running_gateway(server.target, private_image_hosts=web.origin) as gateway:
        assert code_of(await gateway.post(PATH, asked(web.url("/a.png")))) == (401, "UNAUTHENTICATED")
        assert not web.heads
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_too_many_images_are_refused_before_they_are_fetched(web: WebServer, server: FakeServer) -> None:
    async with running_gateway(server.target, private_image_hosts=web.origin) as gateway:
        urls = [web.url(f"/{number}.png") for number in range(1025)]
        assert code_of(await gateway.post(PATH, asked(*urls))) == (400, "IMAGE_COUNT")
        assert not web.heads
