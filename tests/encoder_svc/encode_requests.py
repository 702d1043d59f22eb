"""Images, requests and failed calls of the encoder's tests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import PIL.Image
import pytest

from lookonce import status_codes
from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.errors import LookonceError
from tests import image_files
from tests.encoder_svc.conftest import RunningEncoder

TIMEOUT_S = 30
INTERNALS = re.compile(r"0x[0-9a-f]{6,}|Traceback|site-packages|\.py\b|PIL|torch|/tmp|BytesIO")


def png(seed: int, width: int = 80, height: int = 60) -> bytes:
    """An image file that differs between seeds."""
    return image_files.encoded(image_files.noise(seed, width, height))


def key_of(data: bytes, **fields: Any) -> common_pb2.ContentKey:
    """A reference to an image."""
    return common_pb2.ContentKey(digest=image_digest(data), **fields)


def request(*sources: common_pb2.ImageSource, **fields: Any) -> pb.EncodeRequest:
    """An Encode request for these images."""
    return pb.EncodeRequest(items=[pb.EncodeItem(image=source) for source in sources], **fields)


def source(data: bytes, **fields: Any) -> common_pb2.ImageSource:
    """An image given as bytes."""
    return common_pb2.ImageSource(data=data, **fields)


def black(width: int) -> bytes:
    """A black image; each width is another image."""
    return image_files.encoded(PIL.Image.new("RGB", (width, 60)))


def stream_request(item_id: int, data: bytes, **fields: Any) -> pb.EncodeStreamRequest:
    """One message of EncodeStream with an image given as bytes."""
    return pb.EncodeStreamRequest(item_id=str(item_id), item=pb.EncodeItem(image=source(data), **fields))


async def settled(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def encode_one(encoder: RunningEncoder, data: bytes, **fields: Any) -> pb.EncodeResult:
    """The result of a single image."""
    return (await encoder.stub.Encode(request(source(data, **fields)))).results[0]


async def failure(call: Any) -> tuple[grpc.StatusCode, str, LookonceError]:
    """Status code, ErrorInfo reason and the decoded error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (_drained(call) if hasattr(call, "__aiter__") else call)
    error = status_codes.from_rpc_error(caught.value)
    assert not INTERNALS.search(caught.value.details() or "")
    return caught.value.code(), status_codes.status_row(error).reason, error


async def _drained(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass
