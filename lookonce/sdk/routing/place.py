"""One request's place at a replica, and what its end says about the replica."""

from __future__ import annotations

from typing import Any

import grpc

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.sdk.routing.placement import Placement

# Beginnings of gRPC's texts for calls that it could send to no server, since the connection had just ended. With the
# client's own channel it would have chosen another one.
_UNSENT = ("connections to all backends failing", "failed to connect to all addresses")
_FAILURES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Place:
    """Counts one request at a replica until it has left."""

    def __init__(self, stub: Any, address: str, placement: Placement) -> None:
        """`stub` is the replica's, synchronous or for asyncio as the client is. The request has been counted."""
        self.stub = stub
        self.address = address
        self._placement = placement
        self._has_left = False

    def leave(self) -> None:
        """Notes the end of the request. Later calls have no effect."""
        if not self._has_left:
            self._has_left = True
            self._placement.give_back(self.address)

    def answered(self, load: decoder_pb2.ReplicaLoad | None) -> None:
        """Notes the end of the request with an answer, and the load that it tells; None: it tells none."""
        self._placement.succeeded(self.address)
        if load is not None:
            self._placement.report(self.address, load.running_requests + load.waiting_requests)
        self.leave()

    def failed(self, error: BaseException) -> None:
        """Notes the end of the request with an error."""
        if isinstance(error, grpc.RpcError) and error.code() in _FAILURES:
            self._placement.failed(self.address)
        self.leave()


def is_unsent(error: BaseException) -> bool:
    """Whether a call failed because the replica's connection had just ended, before it was sent."""
    if not isinstance(error, grpc.RpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return (error.details() or "").startswith(_UNSENT)


def load_of(
    response: decoder_pb2.GenerateResponse | decoder_pb2.StreamFinished | None,
) -> decoder_pb2.ReplicaLoad | None:
    """Returns the load that an answer tells; None if it comes from an older decoder, or cannot be parsed."""
    return response.replica_load if response is not None and response.HasField("replica_load") else None
