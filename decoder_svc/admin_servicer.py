"""DecoderAdminService: the operators' RPCs on adapters. Every change leaves a line in the audit log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from decoder_svc.served_adapters import ServedAdapters
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1 import decoder_service_pb2_grpc as pb_grpc
from lookonce.identity import current_identity
from lookonce.logs import get_logger

ADMIN_SERVICE_NAME = "lookonce.decoder.v1.DecoderAdminService"

_audit = get_logger("lookonce.audit")


class DecoderAdminServicer(pb_grpc.DecoderAdminServiceServicer):
    """The handlers ask `ServedAdapters`, and log who has asked."""

    def __init__(self, adapters: ServedAdapters) -> None:
        self._adapters = adapters

    async def LoadAdapter(
        self,
        request: pb.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.LoadAdapterRequest, pb.LoadAdapterResponse],
    ) -> pb.LoadAdapterResponse:
        """Loads an adapter for requests that come from now on."""
        with _audited("load adapter", request.name):
            await self._adapters.load(request.name)
        return pb.LoadAdapterResponse(adapters=self._adapters.names)

    async def UnloadAdapter(
        self,
        request: pb.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse],
    ) -> pb.UnloadAdapterResponse:
        """Frees an adapter when its last request has ended."""
        with _audited("unload adapter", request.name):
            await self._adapters.unload(request.name)
        return pb.UnloadAdapterResponse(adapters=self._adapters.names)


@contextmanager
def _audited(action: str, adapter: str) -> Iterator[None]:
    """Logs who has done something, and whether it went well."""
    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        _audit.info(action, adapter=adapter[:64], caller=current_identity().name, outcome=outcome)
