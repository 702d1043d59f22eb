"""A gateway in the test's event loop, in front of a stand-in for the services or of any decoder, on a real port."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pathlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Self

import openai
import uvicorn
from prometheus_client import CollectorRegistry

from decoder_svc.service import open_service
from decoder_svc.settings import DecoderSettings
from gateway_svc.app import open_app
from gateway_svc.connection_limit import ConnectionLimit
from gateway_svc.endpoints import Endpoints
from gateway_svc.http_connection import http_connections
from gateway_svc.serving import _listening
from gateway_svc.settings import GatewaySettings
from lookonce.server.admission.quotas import load_quotas
from tests.decoder_svc.encoders import served

KEY = "key-of-a-user"
PICTURE = b"the bytes of a picture"


class Gateway:
    """A running gateway, and a client of OpenAI's for it."""

    def __init__(
        self,
        port: int,
        server: uvicorn.Server,
        endpoints: Endpoints,
        registry: CollectorRegistry,
        limit: ConnectionLimit,
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.server = server
        self.endpoints = endpoints
        self.registry = registry
        self.limit = limit
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60.0)

    async def raw(self, request: bytes) -> bytes:
        """Sends bytes over a connection of their own and returns all that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()

    async def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Returns the status and the body of the answer to a POST."""
        lines = {
            "host": "gateway",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        answer = await self.raw(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return int(answer.split(b" ")[1]), answer.partition(b"\r\n\r\n")[2]


@asynccontextmanager
async def running_decoder(folder: pathlib.Path, **more: Any) -> AsyncIterator[str]:
    """Runs a decoder without an encoder and yields its target."""
    pools: dict[str, Any] = {"num_threads": 1, "num_kv_blocks": 200, "max_context_tokens": 2000, "block_size": 16}
    settings = DecoderSettings(model=folder, encoder_target=None, dtype="float32", drain_timeout_s=0.5, **pools, **more)
    registry = CollectorRegistry()
    quotas = load_quotas(settings, registry)
    async with (
        open_service(settings, registry, quotas) as service,
        served(settings, service.entry(), quotas=quotas) as target,
    ):
        yield target


@asynccontextmanager
async def running_gateway(decoder_target: str, max_connections: int = 1000, **settings: Any) -> AsyncIterator[Gateway]:
    """Starts a gateway, on a free port unless `listen` names one, and ends it."""
    registry = CollectorRegistry()
    chosen = GatewaySettings(decoder_target=decoder_target, **{"listen": "127.0.0.1:0", **settings})
    async with open_app(chosen, registry) as (app, endpoints):
        limit = ConnectionLimit(max_connections)
        listening = _listening(chosen.listen, limit)
        http = http_connections(limit)
        config = uvicorn.Config(
            app,
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            ssl_certfile=chosen.tls_cert,
            ssl_keyfile=chosen.tls_key,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([listening]))
        while not server.started:
            await asyncio.sleep(0.005)
        gateway = Gateway(listening.getsockname()[1], server, endpoints, registry, limit)
        try:
            async with gateway.client:
                yield gateway
        finally:
            server.should_exit = True
            server.force_exit = True
            await serving
            listening.close()


class ThreadedGateway:
    """A gateway in a thread of its own, for tests that wait for other programs. It can end and come back."""

    def __init__(self, decoder_target: str, **settings: Any) -> None:
        self._target = decoder_target
        self._settings = settings
        self._port = 0
        self._running = contextlib.ExitStack()

    @property
    def url(self) -> str:
        """The address of the gateway, the same after a restart."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns when the gateway takes calls."""
        started: Future[tuple[int, Callable[[], object]]] = Future()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="gateway")
        thread.start()
        self._running.callback(thread.join)
        self._port, end = started.result(60)
        self._running.callback(end)

    def stop(self) -> None:
        """Ends the gateway and all its connections."""
        self._running.close()

    async def _serve(self, started: Future[tuple[int, Callable[[], object]]]) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            async with running_gateway(self._target, listen=f"127.0.0.1:{self._port}", **self._settings) as gateway:
                started.set_result((gateway.port, lambda: loop.call_soon_threadsafe(ended.set)))
                await ended.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def data_url(data: bytes = PICTURE, kind: str = "image/png") -> str:
    """Returns an image as a URL that contains it."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture_part(data: bytes = PICTURE, **options: Any) -> dict[str, Any]:
    """Returns an image as a part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **options}}
