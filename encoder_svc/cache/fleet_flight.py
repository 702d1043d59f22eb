"""One encode per image over all replicas: who has the lease encodes, the others wait for the rows in the shared cache.

In this process only one flight per key comes here (single_flight.py). A holder renews its lease while its model
answers. Nothing depends on the lease: without Redis, after the holder's death, after too long a wait, or when the
holder could not store its rows, whoever waits encodes for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from encoder_svc.cache.done_channel import DoneChannel
from encoder_svc.cache.encode_lease import EncodeLeases, LeaseAttempt, LeaseState
from encoder_svc.metrics import EncoderMetrics
from lookonce.content_key import ContentKey


class Storable(Protocol):
    """What comes of an encode."""

    @property
    def stored(self) -> bool:
        """Whether the shared cache holds the rows, so that others find them."""
        ...


OutcomeT = TypeVar("OutcomeT", bound=Storable)
ResultT = TypeVar("ResultT")

# What the end of an encode is announced as.
_STORED, _NOT_STORED, _FAILED = b"stored", b"not stored", b"failed"
# Between looks while waiting: a message usually comes first, but it may be lost, and without a connection none comes.
_LOOK_S = 0.25
_LOOK_UNHEARD_S = 0.025
# The end of others' encodes is waited for so many lives of a lease; then nobody is believed to be at it any more,
# whatever Redis says. With the defaults that is 40 s, of the 60 s that a decoder waits for rows.
_MAX_WAIT_LIVES = 8
# A lease is renewed so often during its life.
_RENEWALS_PER_LIFE = 3


class FleetFlight(Generic[OutcomeT]):
    """Owned by the pipeline, on its event loop; Redis is talked to in threads."""

    def __init__(
        self,
        leases: EncodeLeases,
        done: DoneChannel,
        metrics: EncoderMetrics,
        *,
        num_threads: int,
        is_answering: Callable[[], bool],
    ) -> None:
        """`is_answering`: whether this process's model works at all; else its leases are for others."""
        self._is_answering = is_answering
        self._leases = leases
        self._done = done
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lease")
        self._releases: set[asyncio.Task[bool]] = set()

    async def run(
        self,
        key: ContentKey,
        find: Callable[[], Awaitable[OutcomeT | None]],
        encode: Callable[[], Awaitable[OutcomeT]],
    ) -> tuple[OutcomeT, bool]:
        """(outcome, whether another replica made it) of a key that the shared cache did not have a moment ago.

        `find` looks into the shared cache and never raises for trouble with it. Raises what `encode` raises.
        """
        give_up_s = time.monotonic() + _MAX_WAIT_LIVES * self._leases.ttl_s
        has_waited = False
        while time.monotonic() < give_up_s:
            attempt = await self._in_thread(self._leases.acquire, key)
            if attempt.state is LeaseState.UNAVAILABLE:
                return await encode(), False
            if attempt.state is LeaseState.HELD:
                return await self._lead(key, attempt.token, find, encode, was_waiting=has_waited)
            has_waited = True
            found, must_encode = await self._follow(key, attempt, find)
            if found is not None:
                self._metrics.coalesced.labels("fleet").inc()
                return found, True
            if must_encode:
                break
        return await encode(), False

    async def close(self) -> None:
        """Gives back what is held and waits for it."""
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self._done.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def _lead(
        self,
        key: ContentKey,
        token: bytes,
        find: Callable[[], Awaitable[OutcomeT | None]],
        encode: Callable[[], Awaitable[OutcomeT]],
        *,
        was_waiting: bool,
    ) -> tuple[OutcomeT, bool]:
        said = _FAILED
        try:
            async with self._kept_alive(key, token):
                # The one before may have ended between the look and the lease.
                found = await find()
                if found is not None:
                    said = _STORED
                    return found, was_waiting
                if was_waiting:
                    self._metrics.lease_takeovers.inc()
                outcome = await encode()
                said = _STORED if outcome.stored else _NOT_STORED
                return outcome, False
        finally:
            # Nobody here waits for it; the outcome is known.
            release = asyncio.create_task(self._in_thread(self._leases.release, key, token, said))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _follow(
        self, key: ContentKey, attempt: LeaseAttempt, find: Callable[[], Awaitable[OutcomeT | None]]
    ) -> tuple[OutcomeT | None, bool]:
        """(rows, whether to encode without a lease) after the holder's end, or after as long as its lease lasts."""
        until_s = time.monotonic() + max(attempt.remaining_s, _LOOK_UNHEARD_S)
        async with self._done.listening(key) as listener:
            while True:
                # After the subscription, so that an end in between is not missed.
                found = await find()
                if found is not None:
                    return found, False
                if listener.outcome is not None:
                    # Rows that cannot be stored help nobody else: waiting in turn would only make a queue.
                    return None, listener.outcome == _NOT_STORED
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None, False
                await listener.wait(min(left_s, _LOOK_S if self._done.is_connected else _LOOK_UNHEARD_S))

    @contextlib.asynccontextmanager
    async def _kept_alive(self, key: ContentKey, token: bytes) -> AsyncIterator[None]:
        """Renews the lease as long as the block runs and the model answers."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._leases.ttl_s / _RENEWALS_PER_LIFE)
                if self._is_answering():
                    await self._in_thread(self._leases.renew, key, token)

        heartbeat = asyncio.create_task(renew())
        try:
            yield
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)

    async def _in_thread(self, action: Callable[..., ResultT], *arguments: object) -> ResultT:
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: run(action, *arguments))
