"""The channels of a client to a decoder and its encoder, shared with the clients that `with_options` makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Protocol

import grpc
import grpc.aio

from lookonce import tracing
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.decoder_info import ModelInfo
from lookonce.encoder.v1 import encoder_service_pb2_grpc as encoder_grpc
from lookonce.errors import LookonceError, UnsupportedError
from lookonce.sdk.calls import AsyncCalls, SyncCalls, closed_error
from lookonce.sdk.connection.channel import DECODER, ENCODER, ConnectionOptions, Deadline, channel_options
from lookonce.sdk.connection.lazy_channel import LazyChannel
from lookonce.sdk.decoder_facts import model_info_of
from lookonce.sdk.routing.place import load_of
from lookonce.sdk.routing.placed_streams import AsyncPlacedStream, PlacedStream
from lookonce.sdk.routing.replicas import AsyncReplicas, SyncReplicas
from lookonce.sdk.routing.search import Search
from lookonce.sdk.uploads import Uploads

# A replica that does not describe itself within so many seconds is left out.
_DESCRIPTION_S = 3.0


class OpenStream(Protocol):
    """A stream that ends with its client."""

    def _end(self, error: LookonceError) -> None: ...


class SyncConnection:
    """The channels of a synchronous client. Thread-safe."""

    def __init__(
        self, decoder_target: str, encoder_target: str | None, options: ConnectionOptions, calls: SyncCalls
    ) -> None:
        """Opens the decoder's channel. Raises ConfigurationError as `open_channel`."""
        self._decoder_target = decoder_target
        self._encoder_target = encoder_target
        self._options = options
        self._calls = calls
        # Guards the encoder's channel and the streams.
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[OpenStream] = weakref.WeakSet()
        self.decoder_channel = open_channel(decoder_target, DECODER, options)
        self.decoder: decoder_grpc.DecoderServiceStub = decoder_grpc.DecoderServiceStub(self.decoder_channel)
        self._replicas = SyncReplicas(decoder_target, options)
        self._encoder_channel: grpc.Channel | None = None
        # The decoder's first answer, and the same with the adapters of all replicas.
        self.info: ModelInfo | None = None
        self.joined_info: ModelInfo | None = None
        self.uploads = Uploads()

    @property
    def needs_encoder_target(self) -> bool:
        """Whether only the decoder can tell where the encoder is."""
        return self._encoder_target is None

    def check_token_is_safe(self, options: ConnectionOptions) -> None:
        """Raises ConfigurationError if calls with these options would show their token to whoever is on the way."""
        for target in (self._decoder_target, self._encoder_target):
            if target is not None:
                options.check_token_is_safe(target)

    def placed(self, method: str, affinity: bytes, adapter: str, deadline: Deadline) -> Callable[..., Any]:
        """Returns a function that makes the attempts of one call of a method of the decoder.

        The first attempt goes to the replica for this content, later ones to any. With an adapter, all go to a replica
        that has it. Waits a moment if the client has just begun to connect.
        """
        self._replicas.open(deadline)
        is_first = True

        def attempt(request: Any, **options: Any) -> Any:
            nonlocal is_first
            search = Search(self._replicas, affinity, adapter)
            place = search.first() if is_first or adapter else None
            is_first = False
            while True:
                stub = self.decoder if place is None else place.stub
                try:
                    response = getattr(stub, method)(request, **options)
                except BaseException as error:
                    following = search.after(place, error)
                    if following is None and not search.may_go_anywhere(place, error):
                        raise
                    place = following
                else:
                    search.answered(place)
                    if place is not None:
                        place.answered(load_of(response))
                    return response

        return attempt

    def generate_stream(
        self,
        affinity: bytes | None,
        adapter: str,
        request: decoder_pb2.GenerateStreamRequest,
        deadline: Deadline,
        **options: Any,
    ) -> Any:
        """Begins a call at the replica for this content, at any one for None. Waits as `placed`."""

        def start(stub: Any) -> Any:
            return stub.GenerateStream(request, timeout=deadline.remaining_s(), **options)

        if affinity is None:
            return start(self.decoder)
        self._replicas.open(deadline)
        return PlacedStream(Search(self._replicas, affinity, adapter), start, self.decoder)

    def with_all_adapters(self, info: ModelInfo, deadline: Deadline, metadata: tracing.Metadata) -> ModelInfo:
        """Returns a replica's description with the adapters of all replicas of its model."""
        self._replicas.open(deadline)
        serving, others = self._replicas.described()
        request, timeout_s = decoder_pb2.GetModelInfoRequest(), _description_s(deadline)
        asked = {
            address: replica.stub.GetModelInfo.future(request, timeout=timeout_s, metadata=metadata)
            for address, replica in serving.items()
        }
        found: list[ModelInfo] = []
        for address, call in asked.items():
            # The others tell what is served.
            with contextlib.suppress(grpc.RpcError):
                found.append(model_info_of(call.result()))
                self._replicas.adapters.replace(address, found[-1].adapters)
        return _joined(info, found, others)

    def encoder(self, announced_target: str, options: ConnectionOptions) -> encoder_grpc.EncoderServiceStub:
        """Returns the encoder's stub. `announced_target` is the decoder's, for clients that were given none.

        `options` are those of the client that calls. Raises UnsupportedError without a target, AbortedError if the
        client is closed, ConfigurationError as `open_channel`.
        """
        target = self._encoder_target = _target_of_encoder(self._encoder_target, announced_target)
        options.check_token_is_safe(target)
        with self._lock:
            self._calls.check_open()
            if self._encoder_channel is None:
                self._encoder_channel = open_channel(target, ENCODER, self._options)
            return encoder_grpc.EncoderServiceStub(self._encoder_channel)

    def add(self, stream: OpenStream) -> None:
        """Makes a stream end with the connection."""
        with self._lock:
            self._streams.add(stream)

    def close(self) -> None:
        """Closes the channels and ends all calls and streams."""
        self._calls.close()
        with self._lock:
            streams = list(self._streams)
            channels = [self.decoder_channel, self._encoder_channel]
        for channel in channels:
            if channel is not None:
                channel.close()
        self._replicas.close()
        for stream in streams:
            stream._end(closed_error())


class AsyncConnection:
    """The channels of a client for asyncio, opened in the event loop of their first use."""

    def __init__(
        self, decoder_target: str, encoder_target: str | None, options: ConnectionOptions, calls: AsyncCalls
    ) -> None:
        """Opens nothing yet. Raises ConfigurationError as `LazyChannel`."""
        self._decoder_target = decoder_target
        self._encoder_target = encoder_target
        self._options = options
        self._calls = calls
        self._streams: weakref.WeakSet[OpenStream] = weakref.WeakSet()
        self._decoder_channel = LazyChannel(decoder_target, DECODER, options)
        self._decoder_stub: decoder_grpc.DecoderServiceAsyncStub | None = None
        self._replicas = AsyncReplicas(decoder_target, options)
        self._encoder_channel: LazyChannel | None = None
        # The decoder's first answer, and the same with the adapters of all replicas.
        self.info: ModelInfo | None = None
        self.joined_info: ModelInfo | None = None
        self.uploads = Uploads()

    @property
    def needs_encoder_target(self) -> bool:
        """Whether only the decoder can tell where the encoder is."""
        return self._encoder_target is None

    def check_token_is_safe(self, options: ConnectionOptions) -> None:
        """Raises ConfigurationError if calls with these options would show their token to whoever is on the way."""
        for target in (self._decoder_target, self._encoder_target):
            if target is not None:
                options.check_token_is_safe(target)

    @property
    def decoder_channel(self) -> grpc.aio.Channel:
        """The decoder's channel. Raises AbortedError if the client is closed."""
        self._calls.check_open()
        return self._decoder_channel.opened()

    @property
    def decoder(self) -> decoder_grpc.DecoderServiceAsyncStub:
        """The decoder's stub. Raises AbortedError if the client is closed."""
        channel = self.decoder_channel
        if self._decoder_stub is None:
            self._decoder_stub = decoder_grpc.DecoderServiceStub(channel)
        return self._decoder_stub

    async def open_replicas(self, deadline: Deadline) -> None:
        """Connects to single replicas; waits a moment if the client has just begun. Raises AbortedError if closed."""
        # In another event loop than before this raises.
        _ = self.decoder_channel
        await self._replicas.open(deadline)

    def placed(self, method: str, affinity: bytes, adapter: str) -> Callable[..., Awaitable[Any]]:
        """Returns a function that makes the attempts of one call, as that of SyncConnection. Waits for nothing."""
        is_first = True

        async def attempt(request: Any, **options: Any) -> Any:
            nonlocal is_first
            search = Search(self._replicas, affinity, adapter)
            place = search.first() if is_first or adapter else None
            is_first = False
            while True:
                stub = self.decoder if place is None else place.stub
                try:
                    response = await getattr(stub, method)(request, **options)
                except BaseException as error:
                    following = search.after(place, error)
                    if following is None and not search.may_go_anywhere(place, error):
                        raise
                    place = following
                else:
                    search.answered(place)
                    if place is not None:
                        place.answered(load_of(response))
                    return response

        return attempt

    def generate_stream(
        self,
        affinity: bytes | None,
        adapter: str,
        request: decoder_pb2.GenerateStreamRequest,
        deadline: Deadline,
        **options: Any,
    ) -> Any:
        """Begins a call at the replica for this content, at any one for None."""

        def start(stub: Any) -> Any:
            return stub.GenerateStream(request, timeout=deadline.remaining_s(), **options)

        if affinity is None:
            return start(self.decoder)
        return AsyncPlacedStream(Search(self._replicas, affinity, adapter), start, self.decoder)

    async def with_all_adapters(self, info: ModelInfo, deadline: Deadline, metadata: tracing.Metadata) -> ModelInfo:
        """Returns a replica's description with the adapters of all replicas of its model."""
        await self._replicas.open(deadline)
        serving, others = self._replicas.described()
        request, timeout_s = decoder_pb2.GetModelInfoRequest(), _description_s(deadline)
        found: list[ModelInfo] = []

        async def ask(address: str, stub: decoder_grpc.DecoderServiceAsyncStub) -> None:
            # The others tell what is served.
            with contextlib.suppress(grpc.aio.AioRpcError):
                response = await stub.GetModelInfo(request, timeout=timeout_s, metadata=metadata)
                # None cannot be parsed.
                if response is not None:
                    found.append(model_info_of(response))
                    self._replicas.adapters.replace(address, found[-1].adapters)

        await asyncio.gather(*(ask(address, replica.stub) for address, replica in serving.items()))
        return _joined(info, found, others)

    def encoder(self, announced_target: str, options: ConnectionOptions) -> encoder_grpc.EncoderServiceAsyncStub:
        """Returns the encoder's stub. Arguments and errors are those of `SyncConnection.encoder`."""
        target = self._encoder_target = _target_of_encoder(self._encoder_target, announced_target)
        options.check_token_is_safe(target)
        self._calls.check_open()
        if self._encoder_channel is None:
            self._encoder_channel = LazyChannel(target, ENCODER, self._options)
        stub: encoder_grpc.EncoderServiceAsyncStub = encoder_grpc.EncoderServiceStub(self._encoder_channel.opened())
        return stub

    def add(self, stream: OpenStream) -> None:
        """Makes a stream end with the connection."""
        self._streams.add(stream)

    async def close(self) -> None:
        """Closes the channels and ends all calls and streams."""
        self._calls.close()
        # gRPC ends only the calls for which a task is waiting at this moment.
        for stream in list(self._streams):
            stream._end(closed_error())
        await self._decoder_channel.close()
        await self._replicas.close()
        if self._encoder_channel is not None:
            await self._encoder_channel.close()


def open_channel(target: str, service: str | None, options: ConnectionOptions) -> grpc.Channel:
    """Returns a channel for synchronous calls; `service` as in `channel_options`.

    Raises ConfigurationError for unusable TLS files, for a token that would go to another machine without TLS, and for
    a list of addresses with TLS.
    """
    options.check_token_is_safe(target)
    options.check_has_name(target)
    credentials = options.credentials()
    if credentials is None:
        channel = grpc.insecure_channel(target, options=channel_options(service, target=target))
    else:
        channel = grpc.secure_channel(target, credentials, options=channel_options(service, target=target))
    return grpc.intercept_channel(channel, *options.interceptors)


def _target_of_encoder(given: str | None, announced: str) -> str:
    if not (target := given or announced):
        raise UnsupportedError("the decoder does not announce its encoder; give encoder_target to connect")
    return target


def _description_s(deadline: Deadline) -> float:
    remaining_s = deadline.remaining_s()
    return _DESCRIPTION_S if remaining_s is None else min(_DESCRIPTION_S, remaining_s)


def _joined(info: ModelInfo, found: Iterable[ModelInfo], others: Collection[str]) -> ModelInfo:
    """Adds the adapters of other replicas to a description. While a fleet changes, some have another model."""
    adapters = {name for one in (info, *found) if one.model == info.model for name in one.adapters}
    return replace(info, adapters=tuple(sorted(adapters.union(others))))
