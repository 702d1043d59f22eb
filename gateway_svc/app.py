"""The HTTP application: routes, and errors as JSON."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway_svc.access import Access, AccessMetrics
from gateway_svc.apis.chat import ChatRequest
from gateway_svc.apis.completions import CompletionRequest
from gateway_svc.apis.embeddings import EmbeddingRequest
from gateway_svc.apis.messages import MessagesRequest
from gateway_svc.apis.responses import ResponseRequest
from gateway_svc.backend import Backend
from gateway_svc.connected import ClientGoneError
from gateway_svc.endpoints import Endpoints, fault
from gateway_svc.errors import anthropic_body_of, body_of, headers_of, status_of
from gateway_svc.playground.pages import playground_routes
from gateway_svc.settings import GatewaySettings
from lookonce.errors import LookonceError

_ANTHROPIC_PATH = "/v1/messages"
_GENERATING: Mapping[str, Any] = {
    "/v1/chat/completions": ChatRequest.parse,
    "/v1/completions": CompletionRequest.parse,
    "/v1/embeddings": EmbeddingRequest.parse,
    "/v1/responses": ResponseRequest.parse,
    _ANTHROPIC_PATH: MessagesRequest.parse,
}
_LOAD_PATH = "/playground/load"
_PATHS = frozenset({*_GENERATING, "/v1/models", "/health", "/", _LOAD_PATH})


@asynccontextmanager
async def open_app(settings: GatewaySettings, registry: CollectorRegistry) -> AsyncIterator[tuple[ASGIApp, Endpoints]]:
    """Yields the application and its endpoints, and ends their calls afterwards.

    Raises ConfigurationError for settings that cannot be used.
    """
    backend = Backend(settings)
    try:
        endpoints = Endpoints(settings, backend)
        try:
            yield Access(_routes(settings, endpoints), AccessMetrics(registry), _PATHS), endpoints
        finally:
            await endpoints.aclose()
    finally:
        await backend.aclose()


def _routes(settings: GatewaySettings, endpoints: Endpoints) -> Starlette:
    generating = [
        Route(path, functools.partial(endpoints.generate, parse), methods=["POST"])
        for path, parse in _GENERATING.items()
    ]
    others = [
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{model:path}", endpoints.model),
        Route("/health", endpoints.health),
    ]
    if settings.playground:
        others += [*playground_routes(), Route(_LOAD_PATH, endpoints.load)]
    app = Starlette(
        routes=[*generating, *others],
        exception_handlers={
            ClientGoneError: _gone,
            LookonceError: _failed,
            HTTPException: _refused,
            Exception: _failed,
        },
    )
    # A redirection would name the host of the request's own header.
    app.router.redirect_slashes = False
    return app


async def _failed(request: Request, error: Exception) -> Response:
    found = fault(error)
    body = anthropic_body_of(found) if request.url.path == _ANTHROPIC_PATH else body_of(found)
    return JSONResponse(body, status_of(found), headers=headers_of(found))


async def _refused(request: Request, error: Exception) -> Response:
    """Answers what no route takes."""
    assert isinstance(error, HTTPException)
    described = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": described}, error.status_code, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    """Answers a client that has closed its connection: nobody reads it."""
    return Response(status_code=499)
