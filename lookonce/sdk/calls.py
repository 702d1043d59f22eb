"""Single calls of the clients: they have deadlines and metadata, raise typed errors, and end with their client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from lookonce import tracing
from lookonce.errors import AbortedError, LookonceError
from lookonce.sdk.channel import ConnectionOptions, Deadline
from lookonce.sdk.replies import error_of, parsed
from lookonce.status_codes import from_rpc_error

ResponseT = TypeVar("ResponseT")
ResultT = TypeVar("ResultT")


class _Calls:
    """Knows whether a client is closed."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._is_closed = False

    def close(self) -> None:
        """Makes all later calls raise AbortedError. The client closes the channels."""
        self._is_closed = True

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a method. Raises AbortedError if the client is closed, also if it makes no call."""
        self.check_open()
        return self._options.deadline(timeout_s)

    def check_open(self) -> None:
        """Raises AbortedError if the client is closed."""
        if self._is_closed:
            raise closed_error()


class SyncCalls(_Calls):
    """The calls of one synchronous client. Thread-safe."""

    def unary(
        self,
        method: Callable[..., ResponseT],
        request: object,
        deadline: Deadline,
        metadata: tracing.Metadata | None = None,
    ) -> ResponseT:
        """Makes one call and returns its reply. Raises the typed error of its status."""
        metadata = metadata or self._options.metadata()
        try:
            return self.started(lambda: method(request, timeout=deadline.remaining_s(), metadata=metadata))
        except grpc.RpcError as error:
            # The call is its own exception. Its traceback would refer to this frame, and so to the images.
            error.__traceback__ = None
            raise self.error_of(error) from None

    def started(self, start: Callable[[], ResultT]) -> ResultT:
        """Returns the result of `start`, which begins a call. Raises AbortedError if the client is closed."""
        self.check_open()
        try:
            return start()
        except ValueError:
            # gRPC's error for a channel that another thread has just closed.
            self.check_open()
            raise

    def error_of(self, error: grpc.RpcError) -> LookonceError:
        """Returns the typed error of a failed call."""
        if self._is_closed and error.code() is grpc.StatusCode.CANCELLED:
            return closed_error()
        return error_of(error)


class AsyncCalls(_Calls):
    """The calls of one client for asyncio."""

    async def unary(
        self,
        method: Callable[..., Awaitable[ResponseT]],
        request: object,
        deadline: Deadline,
        metadata: tracing.Metadata | None = None,
    ) -> ResponseT:
        """Makes one call and returns its reply. Raises the typed error of its status."""
        metadata = metadata or self._options.metadata()
        self.check_open()
        try:
            return parsed(await method(request, timeout=deadline.remaining_s(), metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            self.check_cancelled()
            raise

    def check_cancelled(self) -> None:
        """Raises AbortedError if a call was cancelled because the client was closed, and not with the caller's task.

        gRPC raises CancelledError in both cases.
        """
        task = asyncio.current_task()
        if self._is_closed and (task is None or not task.cancelling()):
            raise closed_error() from None


def closed_error() -> AbortedError:
    """Returns the error of all calls of a closed client, earlier and later ones."""
    return AbortedError("the client is closed; connect a new one")
