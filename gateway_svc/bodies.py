"""Reads the JSON bodies of requests, within limits on their size, their time and the memory of all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from gateway_svc.errors import RequestTooLargeError
from lookonce.errors import DeadlineError, InvalidInputError, InvalidParameterError, OverloadedError

# Above this size a body is parsed in a thread: 64 KiB take 0.1 ms (2 × AMD EPYC, 2026-11-26).
SMALL_BODY_BYTES = 64 << 10
# Time for a body to arrive, and for a small one, whose caller may have no key. 64 MiB take 54 s at 10 Mbit/s.
_BODY_TIMEOUT_S = 120.0
_SMALL_BODY_TIMEOUT_S = 20.0
# Signs with which a value of JSON begins or ends, and how many a body may have. A text of a million letters has fewer.
_SIGNS = (b",", b"[", b"{", b":")
_MAX_SIGNS = 400_000
# Advice to callers for whom there is no memory.
_RETRY_AFTER_S = 1.0


class Buffers:
    """Counts the bytes that all calls in progress hold. Use it from one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[BufferShare]:
        """Yields the share of one call, which is given back at the end of the block."""
        share = BufferShare(self)
        try:
            yield share
        finally:
            share.give_back()

    def check(self, num_bytes: int) -> None:
        """Raises OverloadedError if so many bytes are not free."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError("the memory for requests is full; try again later", retry_after_s=_RETRY_AFTER_S)

    def take(self, num_bytes: int) -> None:
        """Counts bytes. Raises OverloadedError if they are not free."""
        self.check(num_bytes)
        self.num_bytes += num_bytes


class BufferShare:
    """The bytes of one call."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Adds bytes. Raises OverloadedError if they are not free."""
        self.buffers.take(num_bytes)
        self._num_bytes += num_bytes

    @contextmanager
    def lent(self, num_bytes: int) -> Iterator[None]:
        """Adds bytes until the end of the block. Raises OverloadedError if they are not free."""
        self.buffers.take(num_bytes)
        try:
            yield
        finally:
            self.buffers.num_bytes -= num_bytes

    def give_back(self) -> None:
        """Frees all bytes of the call."""
        self.buffers.num_bytes -= self._num_bytes
        self._num_bytes = 0


def stated_length(request: Request) -> int | None:
    """Returns the length of the body that the request states; None for a body in chunks."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdecimal() else None


async def read_body(request: Request, share: BufferShare, max_bytes: int) -> bytes:
    """Returns the body of a request, and adds its bytes to the call's share.

    Raises RequestTooLargeError, OverloadedError, DeadlineError, and InvalidInputError for a body that is cut.
    """
    stated = stated_length(request)
    if stated is not None:
        _check_size(stated, max_bytes)
        # Nothing is reserved for bytes that may never come.
        share.buffers.check(stated)
    is_small = stated is not None and stated <= SMALL_BODY_BYTES
    timeout_s = _SMALL_BODY_TIMEOUT_S if is_small else _BODY_TIMEOUT_S
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                _check_size(num_bytes, max_bytes)
                share.take(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise DeadlineError(f"the request did not arrive within {timeout_s:.0f} seconds") from None
    except ClientDisconnect:
        raise InvalidInputError("the request ended before its body was complete") from None
    return b"".join(chunks)


def parse_json(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body. Raises InvalidInputError for anything else, and for too many values.

    64 MiB of empty objects would take 1.5 GB, and two seconds of the interpreter in which nobody else is served.
    """
    # Signs in texts count too.
    if sum(body.count(sign) for sign in _SIGNS) > _MAX_SIGNS:
        raise InvalidInputError(f"the body has more than {_MAX_SIGNS} signs of {' '.join(map(bytes.decode, _SIGNS))}")
    try:
        values = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise InvalidInputError("the body is nested too deeply") from None
    except ValueError:
        raise InvalidInputError("the body is not valid JSON") from None
    if not isinstance(values, dict):
        raise InvalidInputError("the body must be a JSON object")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object. Of two values with one name, such as two types in a schema, only the last would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise InvalidParameterError("body", f"an object has the name {twice[:64]!r} twice")
    return found


def _refuse_constant(name: str) -> float:
    raise InvalidParameterError("body", f"{name} is no number of JSON")


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RequestTooLargeError(f"the request has more than {max_bytes} bytes, the limit of this gateway")
