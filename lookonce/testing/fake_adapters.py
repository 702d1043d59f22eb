"""The LoRA adapters of a FakeServer: names without weights, and the operators' calls that change them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.errors import InvalidParameterError
from lookonce.testing.endings import abort


class FakeAdapters(decoder_grpc.DecoderAdminServiceServicer):
    """Loads any name, as if every folder existed. Thread-safe."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """The names that requests may have, sorted."""
        with self._lock:
            return sorted(self._names)

    def check(self, name: str) -> None:
        """Raises InvalidParameterError for a name that is not served; the empty one is the base model."""
        names = self.names
        if name and name not in names:
            known = ", ".join(names) or "none"
            raise InvalidParameterError("adapter", f"{name[:64]!r} is not served; this server has {known}")

    def LoadAdapter(self, request: decoder_pb2.LoadAdapterRequest, context: Any) -> decoder_pb2.LoadAdapterResponse:
        if not request.name:
            abort(context, InvalidParameterError("name", "is empty"))
        with self._lock:
            self._names.add(request.name)
        return decoder_pb2.LoadAdapterResponse(adapters=self.names)

    def UnloadAdapter(
        self, request: decoder_pb2.UnloadAdapterRequest, context: Any
    ) -> decoder_pb2.UnloadAdapterResponse:
        with self._lock:
            was_served = request.name in self._names
            self._names.discard(request.name)
        if not was_served:
            abort(context, InvalidParameterError("name", f"{request.name[:64]!r} is not served"))
        return decoder_pb2.UnloadAdapterResponse(adapters=self.names)
