"""Streams of answers at the replicas that their requests have found."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.sdk.routing.place import load_of
from lookonce.sdk.routing.search import Search


class _PlacedStream:
    """A call that begins anew elsewhere if it was not taken, until its first response."""

    def __init__(self, search: Search, start: Callable[[Any], Any], elsewhere: Any) -> None:
        """`start` begins the call with a stub; `elsewhere` is that of the client's own channel."""
        # None after the first response. Both refer to the request, and so to the images.
        self._search: Search | None = search
        self._start: Callable[[Any], Any] | None = start
        self._elsewhere = elsewhere
        # None: at any replica.
        self._place = search.first()
        self._call = self._begun()

    def cancel(self) -> None:
        """Cancels the call, and gives its place back."""
        self._leave()
        self._call.cancel()

    def _begun(self) -> Any:
        """Begins the call at its place."""
        assert self._start is not None
        if self._place is None:
            return self._start(self._elsewhere)
        # Nobody may read it to its end.
        weakref.finalize(self, self._place.leave)
        try:
            return self._start(self._place.stub)
        except BaseException as error:
            self._place.failed(error)
            raise

    def _leave(self) -> None:
        if self._place is not None:
            self._place.leave()

    def _goes_on(self, error: BaseException) -> bool:
        """Notes a failure. Whether the call is to begin anew, at the place that is set then."""
        search, place = self._search, self._place
        if search is None:
            if place is not None:
                place.failed(error)
            return False
        # Stays so if no replica is left.
        self._search = None
        following = search.after(place, error)
        if following is None and not search.may_go_anywhere(place, error):
            self._start = None
            return False
        self._search, self._place = search, following
        return True

    def _note(self, response: decoder_pb2.GenerateStreamResponse | None) -> None:
        """Notes what a response says about the replica; None is one that cannot be parsed."""
        if self._search is not None:
            self._search.answered(self._place)
            self._search = self._start = None
        if self._place is not None and response is not None and response.HasField("finished"):
            self._place.answered(load_of(response.finished))


class PlacedStream(_PlacedStream, Iterator[decoder_pb2.GenerateStreamResponse]):
    """The responses of a synchronous call."""

    def __init__(self, search: Search, start: Callable[[Any], Any], elsewhere: Any) -> None:
        super().__init__(search, start, elsewhere)
        self._responses: Iterator[decoder_pb2.GenerateStreamResponse] = iter(self._call)

    def __next__(self) -> decoder_pb2.GenerateStreamResponse:
        while True:
            try:
                response = next(self._responses)
            except StopIteration:
                self._leave()
                raise
            except BaseException as error:
                if not self._goes_on(error):
                    raise
            else:
                self._note(response)
                return response
            self._call = self._begun()
            self._responses = iter(self._call)


class AsyncPlacedStream(_PlacedStream, AsyncIterator[decoder_pb2.GenerateStreamResponse]):
    """The responses of a call for asyncio."""

    def __init__(self, search: Search, start: Callable[[Any], Any], elsewhere: Any) -> None:
        super().__init__(search, start, elsewhere)
        self._responses: AsyncIterator[decoder_pb2.GenerateStreamResponse] = aiter(self._call)

    async def __anext__(self) -> decoder_pb2.GenerateStreamResponse:
        while True:
            try:
                response = await anext(self._responses)
            except StopAsyncIteration:
                self._leave()
                raise
            except BaseException as error:
                if not self._goes_on(error):
                    raise
            else:
                self._note(response)
                return response
            self._call = self._begun()
            self._responses = aiter(self._call)
