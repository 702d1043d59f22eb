"""A server that answers bytes which are no reply is unavailable for both clients, in every method."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

import lookonce
from lookonce.decoder.v1 import decoder_service_pb2
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.errors import UnavailableError
from lookonce.images import ImageRef
from tests import image_files
from tests.garbled_service import garbled_service

DECODER = decoder_service_pb2.DESCRIPTOR.services_by_name["DecoderService"]
ENCODER = encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"]
EXPECTED = "the server sent a reply that cannot be read"


@pytest.fixture
async def targets() -> AsyncIterator[tuple[str, str]]:
    async with garbled_service(DECODER) as decoder, garbled_service(ENCODER) as encoder:
        yield decoder, encoder


def image() -> ImageRef:
    return ImageRef.from_bytes(image_files.encoded(image_files.noise(1, 8, 8)))


async def test_a_reply_that_cannot_be_parsed_is_unavailable_for_the_client_of_asyncio(targets: tuple[str, str]) -> None:
    async with lookonce.AsyncClient.connect(*targets) as client:
        for call in (client.generate("what"), client.model_info(), client.encode([image()]), client.lookup([image()])):
            with pytest.raises(UnavailableError, match=EXPECTED):
                await call
        with pytest.raises(UnavailableError, match=EXPECTED):
            [text async for text in client.stream("what")]


async def test_a_reply_that_cannot_be_parsed_is_unavailable_for_the_synchronous_client(
    targets: tuple[str, str],
) -> None:
    with lookonce.Client.connect(*targets) as client:
        calls: list[Callable[[], object]] = [
            lambda: client.generate("what"),
            client.model_info,
            lambda: client.encode([image()]),
            lambda: client.lookup([image()]),
            lambda: list(client.stream("what")),
        ]
        for call in calls:
            with pytest.raises(UnavailableError, match=EXPECTED):
                await asyncio.to_thread(call)
