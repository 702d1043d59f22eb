"""One request's place at a replica: what its end says about the replica, and the streams that have one."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterator
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
        self._address = address
        self._placement = placement
        self._has_left = False

    def leave(self) -> None:
        """Notes the end of the request. Later calls have no effect."""
        if not self._has_left:
            self._has_left = True
            self._placement.give_back(self._address)

    def answered(self, load: decoder_pb2.ReplicaLoad | None) -> None:
        """Notes the end of the request with an answer, and the load that it tells; None: it tells none."""
        self._placement.succeeded(self._address)
        if load is not None:
            self._placement.report(self._address, load.running_requests + load.waiting_requests)
        self.leave()

    def failed(self, error: BaseException) -> None:
        """Notes the end of the request with an error."""
        if isinstance(error, grpc.RpcError) and error.code() in _FAILURES:
            self._placement.failed(self._address)
        self.leave()


def is_unsent(error: BaseException) -> bool:
    """Whether a call failed because the replica's connection had just ended, before it was sent."""
    if not isinstance(error, grpc.RpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return (error.details() or "").startswith(_UNSENT)


class PlacedStream(Iterator[decoder_pb2.GenerateStreamResponse]):
    """The responses of a synchronous call at a replica. A call that could not be sent begins anew elsewhere."""

    def __init__(self, place: Place, start: Callable[[Any], Any], elsewhere: Any) -> None:
        """`start` begins the call with a stub; `elsewhere` is that of the client's own channel."""
        self._place = place
        self._begin_elsewhere: Callable[[], Any] | None = lambda: start(elsewhere)
        # Nobody may read it to its end.
        self._leaving = weakref.finalize(self, place.leave)
        try:
            self._call = start(place.stub)
            self._responses: Iterator[decoder_pb2.GenerateStreamResponse] = iter(self._call)
        except BaseException as error:
            place.failed(error)
            raise

    def __next__(self) -> decoder_pb2.GenerateStreamResponse:
        try:
            response = next(self._responses)
        except StopIteration:
            self._place.leave()
            raise
        except BaseException as error:
            self._place.failed(error)
            if self._begin_elsewhere is None or not is_unsent(error):
                # It refers to the request, and so to the images.
                self._begin_elsewhere = None
                raise
        else:
            self._begin_elsewhere = None
            _note(self._place, response)
            return response
        begin, self._begin_elsewhere = self._begin_elsewhere, None
        self._call = begin()
        self._responses = iter(self._call)
        return next(self._responses)

    def cancel(self) -> None:
        """Cancels the call, and gives its place back."""
        self._place.leave()
        self._call.cancel()


class AsyncPlacedStream(AsyncIterator[decoder_pb2.GenerateStreamResponse]):
    """The responses of a call for asyncio at a replica. A call that could not be sent begins anew elsewhere."""

    def __init__(self, place: Place, start: Callable[[Any], Any], elsewhere: Any) -> None:
        """The arguments are those of PlacedStream."""
        self._place = place
        self._begin_elsewhere: Callable[[], Any] | None = lambda: start(elsewhere)
        # Nobody may read it to its end.
        self._leaving = weakref.finalize(self, place.leave)
        try:
            self._call = start(place.stub)
            self._responses: AsyncIterator[decoder_pb2.GenerateStreamResponse] = aiter(self._call)
        except BaseException as error:
            place.failed(error)
            raise

    async def __anext__(self) -> decoder_pb2.GenerateStreamResponse:
        try:
            response = await anext(self._responses)
        except StopAsyncIteration:
            self._place.leave()
            raise
        except BaseException as error:
            self._place.failed(error)
            if self._begin_elsewhere is None or not is_unsent(error):
                # It refers to the request, and so to the images.
                self._begin_elsewhere = None
                raise
        else:
            self._begin_elsewhere = None
            _note(self._place, response)
            return response
        begin, self._begin_elsewhere = self._begin_elsewhere, None
        self._call = begin()
        self._responses = aiter(self._call)
        return await anext(self._responses)

    def cancel(self) -> None:
        """Cancels the call, and gives its place back."""
        self._place.leave()
        self._call.cancel()


def _note(place: Place, response: decoder_pb2.GenerateStreamResponse | None) -> None:
    """Notes what a response says about the replica; None is one that cannot be parsed."""
    if response is not None and response.HasField("finished"):
        place.answered(load_of(response.finished))


def load_of(
    response: decoder_pb2.GenerateResponse | decoder_pb2.StreamFinished | None,
) -> decoder_pb2.ReplicaLoad | None:
    """Returns the load that an answer tells; None if it comes from an older decoder, or cannot be parsed."""
    return response.replica_load if response is not None and response.HasField("replica_load") else None
