"""The endpoints: from a request to its answer. Keys are checked before large bodies are read and images are fetched."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway_svc.apis.api import ApiRequest, Context, now
from gateway_svc.backend import Backend
from gateway_svc.bodies import SMALL_BODY_BYTES, Buffers, BufferShare, parse_json, read_body, stated_length
from gateway_svc.connected import EventStream, while_connected
from gateway_svc.errors import UnknownModelError, presentable
from gateway_svc.interruptions import Interruptions
from gateway_svc.settings import GatewaySettings
from lookonce import AsyncClient
from lookonce.errors import (
    DeadlineError,
    InternalError,
    InvalidInputError,
    LookonceError,
    UnauthenticatedError,
    UnavailableError,
)
from lookonce.images import ImageRef
from lookonce.logs import get_logger
from lookonce.sdk.in_threads import readers
from lookonce.threads import run_in_thread

_READY_TIMEOUT_S = 1.0
_LOAD_TIMEOUT_S = 5.0
# Images that are fetched at the same time for one key.
_FETCHES_AT_ONCE = 16

_log = get_logger(__name__)


class Endpoints:
    """Answers requests with the help of one decoder. Use it from one event loop."""

    def __init__(self, settings: GatewaySettings, backend: Backend) -> None:
        self._settings = settings
        self._backend = backend
        self._buffers = Buffers(settings.max_buffered_bytes)
        self._interruptions = Interruptions(backend.wait_until_ready)
        # Fetches in progress by key, so that one caller leaves room to others.
        self._fetches: WeakValueDictionary[str | None, asyncio.Semaphore] = WeakValueDictionary()
        self.is_draining = False

    def end_calls(self) -> None:
        """Ends all calls in progress with an answer that says so."""
        self._interruptions.end()

    async def aclose(self) -> None:
        """Ends what runs in the background."""
        await self._interruptions.aclose()

    async def generate(self, parse: Callable[[Mapping[str, Any]], ApiRequest], request: Request) -> Response:
        """Answers a request that `parse` understands, as one object or as events."""
        async with AsyncExitStack() as exits:
            share = exits.enter_context(self._buffers.share())
            key = key_of(request)
            client = self._backend.as_caller(key)
            await self._interruptions.check_served()
            body = await self._body(request, client, share)
            api = await _parsed(parse, body)
            info = await self._backend.check_model(client, api.model)
            if api.remote_images:
                # Nobody fetches images without a key that the decoder accepts.
                await client.load()
            context = Context(
                client=client,
                model=api.model,
                request_id=request.state.request_id,
                timeout_s=self._settings.request_timeout_s,
                token_texts=functools.partial(self._backend.token_texts, client),
                created=now(),
                take_memory=share.take,
            )
            asking = api.ask(self._fetcher(share, key), info)
            ask = await while_connected(request.receive, self._interruptions, asking)
            if api.model != info.model:
                ask = replace(ask, options={**ask.options, "adapter": api.model})
            try:
                if not api.streams:
                    whole = api.whole(ask, context)
                    answer = await while_connected(request.receive, self._interruptions, whole)
                    text = answer if isinstance(answer, bytes) else await _dumped(answer)
                    return Response(text, media_type="application/json")
                events = api.events(ask, context)
                first = await while_connected(request.receive, self._interruptions, _next(events))
            except LookonceError as error:
                if api.model != info.model and error.metadata.get("field") == "adapter":
                    raise UnknownModelError(
                        f"the model {api.model[:100]!r} is not served by this decoder", metadata={"field": "model"}
                    ) from None
                raise api.renamed(error) from None
            return EventStream(_told(first, events, api), self._interruptions, api.failure, exits.pop_all())

    async def models(self, request: Request) -> Response:
        """Lists the model that is served, and its adapters."""
        return JSONResponse({"object": "list", "data": await self._models(request)})

    async def model(self, request: Request) -> Response:
        """Describes the model that is served, or an adapter. Raises UnknownModelError for any other name."""
        models = {model["id"]: model for model in await self._models(request)}
        name = request.path_params["model"]
        if name not in models:
            raise UnknownModelError(f"the model {name[:100]!r} is not served here; this is {next(iter(models))!r}")
        return JSONResponse(models[name])

    async def health(self, request: Request) -> Response:
        """Says 200 while a decoder serves and this gateway takes calls, 503 else."""
        if self.is_draining:
            return JSONResponse({"status": "ending"}, 503)
        try:
            await self._backend.wait_until_ready(_READY_TIMEOUT_S)
        except LookonceError:
            return JSONResponse({"status": "no decoder serves"}, 503)
        return JSONResponse({"status": "ok"})

    async def load(self, request: Request) -> Response:
        """Tells the load of one decoder. Raises UnavailableError if none serves."""
        client = self._backend.as_caller(key_of(request))
        try:
            await self._backend.wait_until_ready(_READY_TIMEOUT_S)
            load = await client.load(timeout_s=_LOAD_TIMEOUT_S)
        except DeadlineError:
            raise UnavailableError("no decoder serves at the moment") from None
        return JSONResponse(
            {
                "running_requests": load.running_requests,
                "waiting_requests": load.waiting_requests,
                "waiting_for_embeddings": load.waiting_for_embeddings,
                "kv_cache_usage": load.kv_cache_usage,
                "encoder_cache_rows": load.encoder_cache_rows,
            },
            headers={"cache-control": "no-store"},
        )

    def _fetcher(self, share: BufferShare, key: str | None) -> Callable[[str], Awaitable[ImageRef]]:
        """Returns the function that fetches the images of one call, whose bytes it adds to the call's share."""
        at_once = self._fetches.setdefault(key, asyncio.Semaphore(_FETCHES_AT_ONCE))

        async def fetch(url: str) -> ImageRef:
            async with at_once:
                # Until it is there, it may have any size.
                with share.lent(self._settings.max_image_bytes):
                    image = await self._backend.fetch(url)
                share.take(len(image.data or b""))
            return image

        return fetch

    async def _models(self, request: Request) -> list[dict[str, Any]]:
        client = self._backend.as_caller(key_of(request))
        await self._interruptions.check_served()
        # The model's description may be remembered, so it says nothing about this caller's key.
        await client.load()
        info = await self._backend.model_info(client)
        base: dict[str, Any] = {
            "id": info.model,
            "object": "model",
            "created": 0,
            "owned_by": "lookonce",
            "lookonce": {
                "model_type": info.model_type,
                "max_context_tokens": info.max_context_tokens,
                "max_images_per_prompt": info.max_images_per_prompt,
                "max_body_bytes": self._settings.max_body_bytes,
            },
        }
        return [base, *({**base, "id": name, "parent": info.model} for name in info.adapters)]

    async def _body(self, request: Request, client: AsyncClient, share: BufferShare) -> bytes:
        kinds = request.headers.getlist("content-type")
        kind, _, parameters = (kinds[0] if len(kinds) == 1 else "").partition(";")
        # Browsers send this kind to another site only after they have asked it, and get no answer to that.
        if kind.strip().lower() != "application/json":
            raise InvalidInputError("the content-type must be application/json")
        if parameters.replace(" ", "").replace('"', "").lower() not in ("", "charset=utf-8"):
            raise InvalidInputError("the body must be UTF-8, without further parameters of its content-type")
        if "content-encoding" in request.headers:
            raise InvalidInputError("the body must not have a content-encoding")
        stated = stated_length(request)
        if stated is None or stated > SMALL_BODY_BYTES:
            await client.load()
        return await read_body(request, share, self._settings.max_body_bytes)


def key_of(request: Request) -> str | None:
    """Returns the caller's key; None without one.

    OpenAI's clients send it as `authorization: Bearer …`, Anthropic's as `x-api-key`. Raises UnauthenticatedError for
    several headers, and for another scheme than Bearer.
    """
    bearers, plain = request.headers.getlist("authorization"), request.headers.getlist("x-api-key")
    if len(bearers) + len(plain) > 1:
        raise UnauthenticatedError("the request has several keys")
    if bearers:
        scheme, _, key = bearers[0].partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError("the key must be sent as authorization: Bearer …")
        return key.strip()
    return plain[0].strip() if plain else None


def fault(error: Exception) -> LookonceError:
    """Returns the error that a client sees, whose text is ours. Logs a fault under the id in its error."""
    if isinstance(error, LookonceError):
        if error.text_is_foreign:
            _log.warning("a call failed", code=error.code, text=error.message[:1000])
        return presentable(error)
    error_id = uuid.uuid4().hex
    _log.error("fault", error_id=error_id, exc_info=error)
    return InternalError(f"a fault of the gateway; its log has the details under {error_id}")


async def _parsed(parse: Callable[[Mapping[str, Any]], ApiRequest], body: bytes) -> ApiRequest:
    """Parses a body, off the event loop if it is large: its images are decoded from base64 and hashed."""

    def work() -> ApiRequest:
        return parse(parse_json(body))

    return work() if len(body) <= SMALL_BODY_BYTES else await run_in_thread(readers(), work)


async def _dumped(answer: Mapping[str, Any]) -> bytes:
    def work() -> bytes:
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()

    has_logprobs = any(choice.get("logprobs") for choice in answer.get("choices", ()))
    return await run_in_thread(readers(), work) if has_logprobs else work()


async def _next(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _told(first: bytes, events: AsyncGenerator[bytes], api: ApiRequest) -> AsyncGenerator[bytes]:
    """Yields all events. An error after the first one becomes an event, since the status has been sent."""
    async with contextlib.aclosing(events):
        yield first
        try:
            async for one in events:
                yield one
        except Exception as error:
            yield api.failure(fault(api.renamed(error) if isinstance(error, LookonceError) else error))
