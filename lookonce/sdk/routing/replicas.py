"""Channels to the single replicas behind a client's target, to which requests go that should meet their image.

All other calls, and repeated ones, take the client's own channel, which is balanced by gRPC. So does every call where
the target is one server, where gRPC alone knows its addresses, and while fewer than two replicas serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import grpc.aio

from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.sdk.connection.channel import DECODER, ConnectionOptions, Deadline, channel_options
from lookonce.sdk.routing.adapter_map import AdapterMap
from lookonce.sdk.routing.place import Place
from lookonce.sdk.routing.placement import Placement
from lookonce.sdk.routing.resolution import resolution_of

# The first calls of a client wait so long for connections to all replicas, seconds, and so much of their deadlines.
_OPENING_S = 0.25
_OPENING_SHARE = 0.25
_POLL_S = 0.005
# A replica that has not been connected within so many seconds of a client's start counts as away for good.
_STARTING_S = 5.0
# While a client makes calls, names are looked up so often, seconds.
_RESOLUTION_AGE_S = 5.0
_READY: int = grpc.ChannelConnectivity.READY.value[0]

ReplicaT = TypeVar("ReplicaT", bound="_SyncReplica | _AsyncReplica")


@dataclass(frozen=True, slots=True, eq=False)
class _SyncReplica:
    # Without interceptors.
    channel: grpc.Channel
    stub: decoder_grpc.DecoderServiceStub

    @property
    def is_ready(self) -> bool:
        """Whether the replica says that it serves. Begins to connect if it does not.

        The public way to ask a synchronous channel needs a thread for each, which polls, delays `close` and lets gRPC
        abort programs that fork. This is what grpc.aio does for `get_state`. Without it no call is routed.
        """
        state = getattr(getattr(self.channel, "_channel", None), "check_connectivity_state", None)
        try:
            return state is not None and state(True) == _READY
        except ValueError:
            # Another thread has closed the channel.
            return False


@dataclass(frozen=True, slots=True, eq=False)
class _AsyncReplica:
    channel: grpc.aio.Channel
    stub: decoder_grpc.DecoderServiceAsyncStub

    @property
    def is_ready(self) -> bool:
        """Whether the replica says that it serves. Begins to connect if it does not."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


class _Replicas(Generic[ReplicaT]):
    """Knows the replicas, and when to look for others."""

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        """Opens nothing yet. Raises ConfigurationError for unusable TLS files."""
        self._resolution = resolution_of(target)
        self._interceptors = list(options.interceptors)
        self._credentials = None if self._resolution is None else options.credentials()
        self._placement = Placement()
        self.adapters = AdapterMap()
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

    def _opening_s(self, deadline: Deadline) -> float:
        """Returns how long a call waits for connections, seconds; 0 unless the client has just begun to connect."""
        if self._opened_s is None or self._are_ready():
            return 0.0
        left_s = self._opened_s + _OPENING_S - time.monotonic()
        remaining_s = deadline.remaining_s()
        return max(0.0, left_s if remaining_s is None else min(left_s, remaining_s * _OPENING_SHARE))

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

    def _update(self, addresses: tuple[str, ...]) -> list[ReplicaT]:
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
                self.adapters.forget(address)
        return [replica for _, replica in idle]

    def _chosen(self, affinity: bytes, adapter: str, tried: Collection[str]) -> Place | None:
        serving = [address for address in self._serving() if address not in tried]
        if adapter:
            # Those that refused it are asked last.
            serving = [one for one in serving if not self.adapters.has_refused(one, adapter)] or serving
        if len(serving) < (1 if adapter else 2):
            return None
        address = self._placement.take(affinity, serving)
        return Place(self._known[address].stub, address, self._placement)

    def _serving(self) -> list[str]:
        return [address for address, replica in self._known.items() if replica.is_ready]

    def _may_be_away(self, adapter: str, refused: Collection[str]) -> bool:
        away = self._known.keys() - set(self._serving()) - set(refused)
        is_starting = self._opened_s is not None and time.monotonic() - self._opened_s < _STARTING_S
        return any(is_starting or adapter in self.adapters.served(address) for address in away)

    def _described(self) -> tuple[dict[str, ReplicaT], set[str]]:
        """Returns the replicas that can be asked for their adapters, and the adapters that others had."""
        serving = {address: self._known[address] for address in self._serving()}
        others = [self.adapters.served(address) for address in self._known if address not in serving]
        return serving, set().union(*others)


class SyncReplicas(_Replicas[_SyncReplica]):
    """The replicas of a synchronous client. Thread-safe."""

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        super().__init__(target, options)
        # Guards all but the placement.
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def open(self, deadline: Deadline) -> None:
        """Connects to the replicas. The first calls of a client wait for it, for a quarter of a second at most."""
        self._refresh()
        with self._lock:
            ends_s = time.monotonic() + self._opening_s(deadline)
        while time.monotonic() < ends_s and not self._closed.wait(_POLL_S):
            with self._lock:
                if self._are_ready():
                    return

    def place(self, affinity: bytes, adapter: str = "", tried: Collection[str] = ()) -> Place | None:
        """Returns the place of a request with this content; None: it goes to any replica.

        A request for an adapter gets a place that is not among the addresses that were `tried`, if there is one.
        """
        if self._resolution is None:
            return None
        self._refresh()
        with self._lock:
            return self._chosen(affinity, adapter, tried)

    def may_be_away(self, adapter: str, refused: Collection[str]) -> bool:
        """Whether a replica that cannot be reached at the moment may have an adapter, beside those that refused it."""
        with self._lock:
            return self._may_be_away(adapter, refused)

    def described(self) -> tuple[dict[str, _SyncReplica], set[str]]:
        """Returns the replicas that can be asked for their adapters, and the adapters that others had."""
        with self._lock:
            return self._described()

    def close(self) -> None:
        """Closes all channels and ends the calls there."""
        with self._lock:
            self._closed.set()
            replicas = [*self._known.values(), *(replica for _, replica in self._retired)]
            self._known.clear()
            self._retired.clear()
        for replica in replicas:
            replica.channel.close()

    def _refresh(self) -> None:
        with self._lock:
            if self._closed.is_set() or not self._is_resolution_due():
                return
            assert self._resolution is not None
            if self._resolution.host:
                self._resolve(self._use)
            else:
                self._update(self._resolution.addresses())

    def _use(self, addresses: tuple[str, ...] | None) -> None:
        with self._lock:
            self._is_resolving = False
            if self._closed.is_set() or addresses is None:
                return
            idle = self._update(addresses)
        for replica in idle:
            replica.channel.close()

    def _connect(self, address: str) -> _SyncReplica:
        options = self._replica_options(address)
        if self._credentials is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            channel = grpc.secure_channel(address, self._credentials, options=options)
        intercepted = grpc.intercept_channel(channel, *self._interceptors)
        return _SyncReplica(channel, decoder_grpc.DecoderServiceStub(intercepted))


class AsyncReplicas(_Replicas[_AsyncReplica]):
    """The replicas of a client for asyncio. Use it from one event loop."""

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        super().__init__(target, options)
        self._closings: set[asyncio.Task[None]] = set()
        self._addressed = asyncio.Event()
        self._is_closed = False

    async def open(self, deadline: Deadline) -> None:
        """Connects to the replicas. The first calls of a client wait for it, for a quarter of a second at most."""
        self._refresh()
        opening_s = self._opening_s(deadline)
        if not opening_s:
            return
        # gRPC raises UsageError if the channel is closed meanwhile.
        with contextlib.suppress(TimeoutError, grpc.aio.UsageError):
            async with asyncio.timeout(opening_s):
                await self._addressed.wait()
                await asyncio.gather(*(replica.channel.channel_ready() for replica in self._known.values()))

    def place(self, affinity: bytes, adapter: str = "", tried: Collection[str] = ()) -> Place | None:
        """Returns a place as that of SyncReplicas."""
        if self._resolution is None:
            return None
        self._refresh()
        return self._chosen(affinity, adapter, tried)

    def may_be_away(self, adapter: str, refused: Collection[str]) -> bool:
        """Whether a replica that cannot be reached at the moment may have an adapter, beside those that refused it."""
        return self._may_be_away(adapter, refused)

    def described(self) -> tuple[dict[str, _AsyncReplica], set[str]]:
        """Returns the replicas that can be asked for their adapters, and the adapters that others had."""
        return self._described()

    async def close(self) -> None:
        """Closes all channels and ends the calls there."""
        self._is_closed = True
        replicas = [*self._known.values(), *(replica for _, replica in self._retired)]
        self._known.clear()
        self._retired.clear()
        await asyncio.gather(*self._closings, *(replica.channel.close() for replica in replicas))

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
        for replica in self._update(addresses):
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
