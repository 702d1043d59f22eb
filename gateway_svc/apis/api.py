"""The common shape of the endpoints that generate: parse a request, fetch its images, tell its answers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway_svc.answers import Ask
from gateway_svc.apis.parsing.content import RemoteImage
from lookonce import AsyncClient
from lookonce.decoder_info import ModelInfo
from lookonce.errors import LookonceError
from lookonce.images import ImageRef


@dataclass(frozen=True, slots=True)
class Context:
    """The circumstances of one request."""

    client: AsyncClient
    # Served name of the model.
    model: str
    request_id: str
    timeout_s: float
    token_texts: Callable[[Sequence[int]], Awaitable[list[str]]]
    # Time of the request, seconds since 1970.
    created: int
    # Counts bytes of the answer until it is sent. Raises OverloadedError if they are not free.
    take_memory: Callable[[int], None]


class ApiRequest(Protocol):
    """A parsed request of one endpoint."""

    @property
    def model(self) -> str:
        """Name of the model that is asked for."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the answer is wanted as events."""
        ...

    @property
    def remote_images(self) -> Sequence[RemoteImage]:
        """Images that must be fetched."""
        ...

    async def ask(self, fetch: Callable[[str], Awaitable[ImageRef]], info: ModelInfo) -> Ask:
        """Returns the request for a decoder of this model, with fetched images.

        Raises InvalidParameterError and UnsupportedError for what the model does not have.
        """
        ...

    async def whole(self, ask: Ask, context: Context) -> dict[str, Any] | bytes:
        """Returns the answer as one object, or as its JSON."""
        ...

    def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields the answer as events. An error before the first one is raised."""
        ...

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        ...

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends an answer with an error."""
        ...


def now() -> int:
    """Returns the time of a request, seconds since 1970."""
    return int(time.time())


def event(values: Mapping[str, Any], name: str | None = None) -> bytes:
    """Returns one event of a stream."""
    data = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    return (f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n").encode()
