"""An encoder whose stream goes on for as long as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from lookonce.encoder.v1 import encoder_service_pb2 as pb
from tests.lookonce.server.serving_program import UnsupportedEncoder


class SlowReader(UnsupportedEncoder):
    """ReadEmbedding goes on until `end` is set."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def GetEncoderInfo(self, request: Any, context: Any) -> pb.GetEncoderInfoResponse:
        return pb.GetEncoderInfoResponse(model="test")

    async def ReadEmbedding(self, request: Any, context: Any) -> AsyncIterator[pb.ReadEmbeddingResponse]:
        yield pb.ReadEmbeddingResponse(row_offset=1)
        await self.end.wait()
        yield pb.ReadEmbeddingResponse(row_offset=2)
