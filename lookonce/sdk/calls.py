"""Single calls of the clients: they have deadlines and metadata, raise typed errors, and end with their client."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, Self, TypeVar

import grpc.aio

from lookonce import tracing
from lookonce.errors import AbortedError, DeadlineError, LookonceError
from lookonce.identity import REQUEST_ID_KEY
from lookonce.sdk.connection.channel import ConnectionOptions, Deadline
from lookonce.sdk.field_names import in_arguments
from lookonce.sdk.replies import error_of, parsed
from lookonce.sdk.retries import Attempts, Retries
from lookonce.status_codes import from_rpc_error

EventT = TypeVar("EventT", threading.Event, asyncio.Event)
ResponseT = TypeVar("ResponseT")
ResultT = TypeVar("ResultT")


class _Calls(Generic[EventT]):
    """Knows whether a client is closed, and what its calls share."""

    def __init__(self, options: ConnectionOptions, closed: EventT, retries: Retries) -> None:
        self._options = options
        self._retries = retries
        self._closed: EventT = closed

    def with_options(self, options: ConnectionOptions) -> Self:
        """Returns calls with other options that end with the same client, and share its budget of retries."""
        calls = copy.copy(self)
        calls._options = options
        return calls

    def close(self) -> None:
        """Makes all later calls raise AbortedError, and ends pauses. The client closes the channels."""
        self._closed.set()

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a method. Raises AbortedError if the client is closed, also if it makes no call."""
        self.check_open()
        return self._options.deadline(timeout_s)

    def attempts(self, deadline: Deadline) -> Attempts:
        """Returns the attempts of a new call, which decide whether it is repeated."""
        return self._retries.attempts(deadline, self._options.max_retries)

    @staticmethod
    def with_id(error: LookonceError, metadata: tracing.Metadata) -> LookonceError:
        """Gives an error the id of its call if no server has answered with one, and the name of a wrong argument."""
        if error.request_id is None:
            error.request_id = dict(metadata).get(REQUEST_ID_KEY)
        return in_arguments(error)

    def check_open(self) -> None:
        """Raises AbortedError if the client is closed."""
        if self._closed.is_set():
            raise closed_error()


class SyncCalls(_Calls[threading.Event]):
    """The calls of one synchronous client. Thread-safe."""

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__(options, threading.Event(), Retries())

    def pause(self, pause_s: float) -> None:
        """Waits before the next attempt of a call. Raises AbortedError if the client is closed meanwhile."""
        self._closed.wait(pause_s)
        self.check_open()

    def unary(
        self,
        method: Callable[..., ResponseT],
        request: object,
        deadline: Deadline,
        metadata: tracing.Metadata | None = None,
    ) -> ResponseT:
        """Makes one call and returns its reply; repeats it as retries.py says. Raises the typed error of its status."""
        metadata = metadata or self._options.metadata()
        attempts = self.attempts(deadline)
        while True:
            try:
                reply = self._once(method, request, deadline, metadata, attempts)
            except LookonceError as error:
                pause_s = attempts.pause_s(error)
                if pause_s is None:
                    raise
            else:
                attempts.succeeded()
                return reply
            self.pause(pause_s)

    def _once(
        self,
        method: Callable[..., ResponseT],
        request: object,
        deadline: Deadline,
        metadata: tracing.Metadata,
        attempts: Attempts,
    ) -> ResponseT:
        def start() -> ResponseT:
            timeout_s = deadline.remaining_s()
            return method(request, timeout=timeout_s, metadata=metadata, wait_for_ready=attempts.wait_for_ready)

        try:
            return self.started(start)
        except grpc.RpcError as error:
            # The call is its own exception. Its traceback would refer to this frame, and so to the images.
            error.__traceback__ = None
            raise self.with_id(self.error_of(error), metadata) from None

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
        if self._closed.is_set() and error.code() is grpc.StatusCode.CANCELLED:
            return closed_error()
        return error_of(error)


class AsyncCalls(_Calls[asyncio.Event]):
    """The calls of one client for asyncio."""

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__(options, asyncio.Event(), Retries())

    async def pause(self, pause_s: float) -> None:
        """Waits before the next attempt of a call. Raises AbortedError if the client is closed meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closed.wait()
        self.check_open()

    async def unary(
        self,
        method: Callable[..., Awaitable[ResponseT]],
        request: object,
        deadline: Deadline,
        metadata: tracing.Metadata | None = None,
    ) -> ResponseT:
        """Makes one call and returns its reply; repeats it as retries.py says. Raises the typed error of its status."""
        metadata = metadata or self._options.metadata()
        attempts = self.attempts(deadline)
        while True:
            try:
                reply = await self._once(method, request, deadline, metadata, attempts)
            except LookonceError as error:
                pause_s = attempts.pause_s(error)
                if pause_s is None:
                    raise
            else:
                attempts.succeeded()
                return reply
            await self.pause(pause_s)

    async def _once(
        self,
        method: Callable[..., Awaitable[ResponseT]],
        request: object,
        deadline: Deadline,
        metadata: tracing.Metadata,
        attempts: Attempts,
    ) -> ResponseT:
        self.check_open()
        timeout_s, wait_for_ready = deadline.remaining_s(), attempts.wait_for_ready
        try:
            return parsed(await method(request, timeout=timeout_s, metadata=metadata, wait_for_ready=wait_for_ready))
        except grpc.aio.AioRpcError as error:
            raise self.with_id(from_rpc_error(error), metadata) from None
        except asyncio.CancelledError:
            self.check_cancelled()
            raise

    def check_cancelled(self) -> None:
        """Raises AbortedError if a call was cancelled because the client was closed, and not with the caller's task.

        gRPC raises CancelledError in both cases.
        """
        task = asyncio.current_task()
        if self._closed.is_set() and (task is None or not task.cancelling()):
            raise closed_error() from None


def closed_error() -> AbortedError:
    """Returns the error of all calls of a closed client, earlier and later ones."""
    return AbortedError("the client is closed; connect a new one")


def not_ready_error() -> DeadlineError:
    """Returns the error for a server that did not become ready in time."""
    return DeadlineError("no server could be reached that says it serves; check the target, TLS and the server's log")
