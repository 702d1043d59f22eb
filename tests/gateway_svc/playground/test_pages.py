"""The files of the playground, their headers, and the load that it shows."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import gateway_svc.playground
from lookonce.testing import FakeServer
from tests.gateway_svc.gateways import Gateway, running_gateway

STATIC = pathlib.Path(gateway_svc.playground.__file__).parent / "static"
NAMES = sorted(path.name for path in STATIC.iterdir())


@pytest.fixture(scope="module")
def server() -> Any:
    with FakeServer("a red square") as running:
        yield running


@pytest.fixture
async def gateway(server: FakeServer) -> AsyncIterator[Gateway]:
    async with running_gateway(server.target, playground=True) as running:
        yield running


async def test_it_is_off_unless_asked_for(server: FakeServer) -> None:
    async with running_gateway(server.target) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        for path in ("/", "/playground/main.js", "/playground/load"):
            assert (await client.get(path)).status_code == 404


async def test_all_files_are_served_with_headers_that_allow_nothing_else(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for name in NAMES:
            path = "/" if name == "index.html" else f"/playground/{name}"
            answer = await client.get(path)
            assert (answer.status_code, answer.content) == (200, (STATIC / name).read_bytes())
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"
            again = await client.get(path, headers={"if-none-match": f'"other", W/{answer.headers["etag"]}'})
            assert (again.status_code, again.content) == (304, b"")
            head = await client.head(path)
            assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", answer.headers["etag"])


async def test_nothing_but_these_files_can_be_had(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for path in ("/playground/", "/playground/index.html", "/playground/pages.py", "/playground/%2e%2e/pages.py"):
            assert (await client.get(path)).status_code == 404
        for path in ("/", "/playground/main.js", "/playground/load"):
            assert (await client.post(path)).status_code == 405
    # No client library sends such a path as it is.
    answer = await gateway.raw(b"GET /playground/../pages.py HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")


def test_the_page_loads_only_files_that_are_there_and_runs_no_script_of_its_own() -> None:
    page = (STATIC / "index.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {path.removeprefix("playground/") for path in loaded} <= set(NAMES)
    assert re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", page) is None
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        assert set(re.findall(r' from "\./([^"]+)"', text)) <= set(NAMES)
        assert (
            re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|https?://(?!www\.w3)", text) is None
        )


async def test_the_load_is_that_of_a_decoder(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        answer = await client.get("/playground/load")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json() == {
            "running_requests": 0,
            "waiting_requests": 0,
            "waiting_for_embeddings": 0,
            "kv_cache_usage": 0.0,
            "encoder_cache_rows": 0,
        }
        model = (await client.get("/v1/models")).json()["data"][0]
    assert model["lookonce"]["max_body_bytes"] == 64 << 20


async def test_without_a_decoder_the_load_says_so() -> None:
    with FakeServer() as server:
        target = server.target
    async with running_gateway(target, playground=True) as gateway:
        request = b"GET /playground/load HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        head, _, body = (await asyncio.wait_for(gateway.raw(request), 60)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["message"] == "no decoder serves at the moment"
