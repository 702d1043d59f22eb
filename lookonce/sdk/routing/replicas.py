"""Channels to the single replicas behind a client's target, to which requests go that should meet their image.

All other calls, and repeated ones, take the client's own channel, which is balanced by gRPC. So does every call where
the target is one server, where gRPC alone knows its addresses, and while fewer than two replicas serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from lookonce import tracing
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.identity import AFFINITY_KEY, REQUEST_ID_KEY
from lookonce.sdk.connection.channel import DECODER, ConnectionOptions, Deadline, channel_options
from lookonce.sdk.routing.placement import Placement
from lookonce.sdk.routing.resolution import resolution_of

# The first calls of a client wait so long for connections to all replicas, seconds.
_OPENING_S = 0.25
# While a client makes calls, names are looked up so often, seconds.
_RESOLUTION_AGE_S = 5.0
# Replicas are asked for their load at most so often, seconds, and once per so many calls to each.
_LOOK_S = 1.0
_CALLS_PER_LOOK = 10
_LOAD_TIMEOUT_S = 1.0

ReplicaT = TypeVar("ReplicaT", bound="_SyncReplica | _AsyncReplica")


@dataclass(slots=True, eq=False, weakref_slot=True)
class _SyncReplica:
    channel: grpc.Channel
    stub: decoder_grpc.DecoderServiceStub
    is_ready: bool = False


@dataclass(slots=True, eq=False)
class _AsyncReplica:
    channel: grpc.aio.Channel
    stub: decoder_grpc.DecoderServiceAsyncStub

    @property
    def is_ready(self) -> bool:
        """Whether the replica says that it serves. Begins to connect if it does not."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


class Place(Generic[ReplicaT]):
    """One request's place at a replica."""

    def __init__(self, replica: ReplicaT, leave: Callable[[], None]) -> None:
        self._replica = replica
        self._leave: Callable[[], None] | None = leave

    @property
    def stub(self) -> Any:
        """The replica's stub, synchronous or for asyncio as the client is."""
        return self._replica.stub

    def leave(self) -> None:
        """Notes the end of the request. Later calls have no effect."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class _Replicas(Generic[ReplicaT]):
    """Knows the replicas, and when to look for others."""

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        """Opens nothing yet. Raises ConfigurationError for unusable TLS files."""
        self._resolution = resolution_of(target)
        self._interceptors = list(options.interceptors)
        self._credentials = None if self._resolution is None else options.credentials()
        self._placement = Placement()
        # By address.
        self._known: dict[str, ReplicaT] = {}
        # Replicas that are not behind the target any more, with calls in progress.
        self._retired: list[tuple[str, ReplicaT]] = []
        # Times at which the addresses were asked for last, and first.
        self._resolved_s: float | None = None
        self._opened_s: float | None = None
        self._has_addresses = False
        # Whether a thread waits for the name server.
        self._is_resolving = False
        self._looked_s = 0.0
        self._num_calls = 0

    def _connect(self, address: str) -> ReplicaT:
        raise NotImplementedError

    def _replica_options(self, address: str) -> list[tuple[str, int | str]]:
        options = channel_options(DECODER, target=address)
        if self._resolution is not None and self._resolution.authority is not None:
            options.append(("grpc.default_authority", self._resolution.authority))
            options.append(("grpc.ssl_target_name_override", self._resolution.host))
        return options

    def _is_resolution_due(self) -> bool:
        """Whether addresses are to be looked up now. Notes that they are."""
        if self._resolution is None or self._is_resolving:
            return False
        is_old = self._resolved_s is None or (
            bool(self._resolution.host) and time.monotonic() - self._resolved_s >= _RESOLUTION_AGE_S
        )
        if is_old:
            self._resolved_s = time.monotonic()
            self._opened_s = self._resolved_s if self._opened_s is None else self._opened_s
        return is_old

    def _opening_ends_s(self, deadline: Deadline) -> float | None:
        """Returns until when a call waits for connections, on the monotonic clock; None if it does not wait."""
        if self._opened_s is None or self._are_ready():
            return None
        now_s, ends_s = time.monotonic(), self._opened_s + _OPENING_S
        remaining_s = deadline.remaining_s()
        if remaining_s is not None:
            ends_s = min(ends_s, now_s + remaining_s)
        return ends_s if now_s < ends_s else None

    def _are_ready(self) -> bool:
        return self._has_addresses and all(one.is_ready for one in self._known.values())

    def _resolve(self, use: Callable[[tuple[str, ...] | None], None]) -> None:
        """Asks the name server in a thread, which calls `use` with the addresses; with None if there is no answer."""
        resolution = self._resolution
        assert resolution is not None
        self._is_resolving = True

        def work() -> None:
            addresses = None
            # A name that cannot be one is a ValueError.
            with contextlib.suppress(OSError, ValueError):
                addresses = resolution.addresses()
            use(addresses)

        # The end of the program does not wait for a name server.
        threading.Thread(target=work, name="lookonce-names", daemon=True).start()

    def _changed(self, addresses: tuple[str, ...]) -> list[ReplicaT]:
        """Connects to new replicas, retires those that have gone, and returns the ones to close."""
        self._has_addresses = True
        if len(addresses) < 2:
            addresses = ()
        for address in self._known.keys() - set(addresses):
            self._retired.append((address, self._known.pop(address)))
        for address in addresses:
            if address not in self._known:
                self._known[address] = self._connect(address)
        idle = [one for one in self._retired if not self._placement.num_own(one[0])]
        self._retired = [one for one in self._retired if one not in idle]
        for address, _ in idle:
            if address not in self._known:
                self._placement.forget(address)
        return [replica for _, replica in idle]

    def _chosen(self, affinity: bytes) -> Place[ReplicaT] | None:
        serving = [address for address, replica in self._known.items() if replica.is_ready]
        if len(serving) < 2:
            return None
        self._num_calls += 1
        address = self._placement.take(affinity, serving)
        return Place(self._known[address], lambda: self._placement.give_back(address))

    def _to_look_at(self) -> list[tuple[str, ReplicaT]]:
        """Returns the replicas to ask for their load now, if it is time."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S or self._num_calls < _CALLS_PER_LOOK * len(self._known):
            return []
        self._looked_s, self._num_calls = now_s, 0
        return [(address, replica) for address, replica in self._known.items() if replica.is_ready]

    def _report(self, address: str, response: decoder_pb2.GetLoadResponse) -> None:
        self._placement.report(address, response.running_requests + response.waiting_requests)


class SyncReplicas(_Replicas[_SyncReplica]):
    """The replicas of a synchronous client. Thread-safe."""

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        super().__init__(target, options)
        # Guards all but the placement. Notified when a replica becomes ready.
        self._condition = threading.Condition()
        self._is_closed = False

    def open(self, deadline: Deadline) -> None:
        """Connects to the replicas. The first calls of a client wait for it, for a quarter of a second at most."""
        self._refresh()
        with self._condition:
            ends_s = self._opening_ends_s(deadline)
            if ends_s is not None:
                self._condition.wait_for(lambda: self._is_closed or self._are_ready(), ends_s - time.monotonic())

    def place(self, affinity: bytes, metadata: tracing.Metadata) -> Place[_SyncReplica] | None:
        """Returns the place of a request with this content; None: it goes to any replica.

        `metadata` is that of the request.
        """
        if self._resolution is None:
            return None
        self._refresh()
        with self._condition:
            place = self._chosen(affinity)
            to_look_at = self._to_look_at()
        for address, replica in to_look_at:
            self._look_at(address, replica, metadata)
        return place

    def close(self) -> None:
        """Closes all channels and ends the calls there."""
        with self._condition:
            self._is_closed = True
            replicas = [*self._known.values(), *(replica for _, replica in self._retired)]
            self._known.clear()
            self._retired.clear()
        for replica in replicas:
            replica.channel.close()

    def _refresh(self) -> None:
        with self._condition:
            if self._is_closed or not self._is_resolution_due():
                return
            assert self._resolution is not None
            if self._resolution.host:
                self._resolve(self._use)
            else:
                self._use(self._resolution.addresses())

    def _use(self, addresses: tuple[str, ...] | None) -> None:
        with self._condition:
            self._is_resolving = False
            if self._is_closed or addresses is None:
                return
            idle = self._changed(addresses)
            self._condition.notify_all()
        for replica in idle:
            replica.channel.close()

    def _connect(self, address: str) -> _SyncReplica:
        options = self._replica_options(address)
        if self._credentials is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            channel = grpc.secure_channel(address, self._credentials, options=options)
        channel = grpc.intercept_channel(channel, *self._interceptors)
        replica = _SyncReplica(channel, decoder_grpc.DecoderServiceStub(channel))

        channel.subscribe(_Watch(replica, self._condition), try_to_connect=True)
        return replica

    def _look_at(self, address: str, replica: _SyncReplica, metadata: tracing.Metadata) -> None:
        def note(asked: Any) -> None:
            with contextlib.suppress(Exception):
                self._report(address, asked.result())

        # Nobody asked for it, so no error of it concerns the caller, such as one that an interceptor raises.
        with contextlib.suppress(Exception):
            replica.stub.GetLoad.future(
                decoder_pb2.GetLoadRequest(), timeout=_LOAD_TIMEOUT_S, metadata=_of_look(metadata)
            ).add_done_callback(note)


class _Watch:
    """Notes the state of a replica's connection.

    gRPC's thread holds it, so it does not hold the replica: a client that nobody refers to closes its channels.
    """

    def __init__(self, replica: _SyncReplica, condition: threading.Condition) -> None:
        self._replica = weakref.ref(replica)
        self._condition = condition

    def __call__(self, state: grpc.ChannelConnectivity) -> None:
        replica = self._replica()
        if replica is not None:
            with self._condition:
                replica.is_ready = state is grpc.ChannelConnectivity.READY
                self._condition.notify_all()


class AsyncReplicas(_Replicas[_AsyncReplica]):
    """The replicas of a client for asyncio. Use it from one event loop."""

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        super().__init__(target, options)
        self._looks: set[asyncio.Task[None]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._addressed = asyncio.Event()
        self._is_closed = False

    async def open(self, deadline: Deadline) -> None:
        """Connects to the replicas. The first calls of a client wait for it, for a quarter of a second at most."""
        self._refresh()
        ends_s = self._opening_ends_s(deadline)
        if ends_s is None:
            return
        # gRPC raises UsageError if the channel is closed meanwhile.
        with contextlib.suppress(TimeoutError, grpc.aio.UsageError):
            async with asyncio.timeout(ends_s - time.monotonic()):
                await self._addressed.wait()
                await asyncio.gather(*(replica.channel.channel_ready() for replica in self._known.values()))

    def place(self, affinity: bytes, metadata: tracing.Metadata) -> Place[_AsyncReplica] | None:
        """Returns the place of a request with this content; None: it goes to any replica.

        `metadata` is that of the request.
        """
        if self._resolution is None:
            return None
        self._refresh()
        place = self._chosen(affinity)
        for address, replica in self._to_look_at():
            look = asyncio.create_task(self._look_at(address, replica, metadata))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)
        return place

    async def close(self) -> None:
        """Closes all channels and ends the calls there."""
        self._is_closed = True
        for look in self._looks:
            look.cancel()
        replicas = [*self._known.values(), *(replica for _, replica in self._retired)]
        self._known.clear()
        self._retired.clear()
        await asyncio.gather(*self._looks, *self._closings, return_exceptions=True)
        for replica in replicas:
            await replica.channel.close()

    def _refresh(self) -> None:
        if self._is_closed or not self._is_resolution_due():
            return
        assert self._resolution is not None
        if not self._resolution.host:
            self._use(self._resolution.addresses())
            return
        loop = asyncio.get_running_loop()

        def use(addresses: tuple[str, ...] | None) -> None:
            # The event loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._use, addresses)

        self._resolve(use)

    def _use(self, addresses: tuple[str, ...] | None) -> None:
        self._is_resolving = False
        if self._is_closed or addresses is None:
            return
        for replica in self._changed(addresses):
            closing = asyncio.create_task(replica.channel.close())
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)
        self._addressed.set()

    def _connect(self, address: str) -> _AsyncReplica:
        options, interceptors = self._replica_options(address), self._interceptors
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
        else:
            channel = grpc.aio.secure_channel(address, self._credentials, options=options, interceptors=interceptors)
        return _AsyncReplica(channel, decoder_grpc.DecoderServiceStub(channel))

    async def _look_at(self, address: str, replica: _AsyncReplica, metadata: tracing.Metadata) -> None:
        # Nobody asked for it, so no error of it concerns the caller, such as one that an interceptor raises.
        with contextlib.suppress(Exception):
            response = await replica.stub.GetLoad(
                decoder_pb2.GetLoadRequest(), timeout=_LOAD_TIMEOUT_S, metadata=_of_look(metadata)
            )
            self._report(address, response)


def _of_look(metadata: tracing.Metadata) -> tracing.Metadata:
    """Returns the metadata of a question about the load: the request's without what concerns this request."""
    return tuple((name, value) for name, value in metadata if name not in (REQUEST_ID_KEY, AFFINITY_KEY))
