"""A real service process for the drain tests: EncoderService whose EncodeStream answers slowly."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.errors import UnsupportedError
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.serving import GrpcService, run
from lookonce.server.settings import ServiceSettings
from lookonce.server.settings_parser import parse_settings
from lookonce.server.telemetry import Telemetry

FULL_NAME = "lookonce.encoder.v1.EncoderService"


class UnsupportedEncoder(pb_grpc.EncoderServiceServicer):
    """Refuses every call. Tests override the calls that they need."""

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        raise UnsupportedError("not in this test")

    def EncodeStream(
        self, requests: AsyncIterator[pb.EncodeStreamRequest], context: Any
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        raise UnsupportedError("not in this test")

    async def LookupEmbeddings(self, request: pb.LookupEmbeddingsRequest, context: Any) -> pb.LookupEmbeddingsResponse:
        raise UnsupportedError("not in this test")

    def ReadEmbedding(self, request: pb.ReadEmbeddingRequest, context: Any) -> AsyncIterator[pb.ReadEmbeddingResponse]:
        raise UnsupportedError("not in this test")

    async def GetEncoderInfo(self, request: pb.GetEncoderInfoRequest, context: Any) -> pb.GetEncoderInfoResponse:
        raise UnsupportedError("not in this test")


class SlowEncoder(UnsupportedEncoder):
    """EncodeStream answers each item after 0.2 s, but never the item "forever". GetEncoderInfo returns the caller."""

    async def GetEncoderInfo(self, request: pb.GetEncoderInfoRequest, context: Any) -> pb.GetEncoderInfoResponse:
        # The peer identifies the connection of the call.
        return pb.GetEncoderInfoResponse(model=context.peer())

    async def EncodeStream(
        self, requests: AsyncIterator[pb.EncodeStreamRequest], context: Any
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        async for request in requests:
            await asyncio.sleep(3600 if request.item_id == "forever" else 0.2)
            yield pb.EncodeStreamResponse(item_id=request.item_id)


async def main() -> None:
    settings = parse_settings(ServiceSettings, sys.argv[1:], "serving_program")
    servicer = SlowEncoder()

    def add(server: Any) -> None:
        pb_grpc.add_EncoderServiceServicer_to_server(servicer, server)

    service = GrpcService(settings, Telemetry.from_settings(settings), [ServiceEntry(FULL_NAME, add)])
    await service.serve_until_stopped()


if __name__ == "__main__":
    run(main())
