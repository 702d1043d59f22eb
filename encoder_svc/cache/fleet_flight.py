"""One encode per image over all replicas: the holder of a lease encodes, the others wait for rows in the shared cache.

Within this process only one flight per key gets here (single_flight.py). A holder renews its lease while its model
answers. No result depends on the lease: without Redis, after the holder's death, after too long a wait, or when the
holder could not store its rows, a waiting replica encodes for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from encoder_svc.cache.done_channel import DoneChannel
from encoder_svc.cache.encode_lease import EncodeLeases, LeaseAttempt, LeaseState
from encoder_svc.metrics import EncoderMetrics
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.threads import run_in_thread

# The announcements of an encode's end.
_STORED, _NOT_STORED, _FAILED = b"stored", b"not stored", b"failed"
# Pause between looks into the cache while waiting. The announcement usually comes first, but it may be lost; without a
# subscription none comes, so the second pause is short.
_LOOK_S = 0.25
_LOOK_UNHEARD_S = 0.025
# A replica waits at most this many lease lifetimes for others, whatever Redis says; then it encodes. With the default
# settings that is 40 s of the 60 s that a decoder waits for rows.
_MAX_WAIT_LIVES = 8
# Longest wait between two attempts to get the lease, seconds. A holder may have given it up, without rows, before this
# replica could hear its announcement.
_RETRY_S = 1.0
# Renewals during one lifetime of a lease.
_RENEWALS_PER_LIFE = 3


@dataclass(slots=True)
class Claim:
    """The claim to encode an image, or the rows that made encoding unnecessary. Made by `FleetFlight.claimed`."""

    # Proof of the lease that is held during the block; empty without one.
    lease_token: bytes = b""
    # Description of the rows that the shared cache holds by now; None: encode.
    found: EmbeddingMeta | None = None
    # Whether another replica was at work meanwhile.
    has_waited: bool = False
    # To be set by the block after encoding: whether the shared cache took the rows. None: encoding failed.
    stored: bool | None = None

    @property
    def announcement(self) -> bytes:
        """The message that tells other replicas the outcome."""
        if self.found is not None or self.stored:
            return _STORED
        return _FAILED if self.stored is None else _NOT_STORED


class FleetFlight:
    """Decides with the other replicas who encodes an image. Event loop only; Redis is talked to in threads."""

    def __init__(
        self,
        leases: EncodeLeases,
        done: DoneChannel,
        find: Callable[[ContentKey], Awaitable[EmbeddingMeta | None]],
        metrics: EncoderMetrics,
        *,
        num_threads: int,
        is_answering: Callable[[], bool],
    ) -> None:
        """Owns `done`.

        `find` looks into the shared cache again and never raises for trouble with it. `is_answering`: whether this
        process's model works at all; while it does not, leases are not renewed and pass to other replicas.
        """
        self._leases = leases
        self._done = done
        self._find = find
        self._is_answering = is_answering
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lease")
        # Leases that are being given back, by `ContentKey.value`.
        self._releases: dict[bytes, asyncio.Task[bool]] = {}

    @contextlib.asynccontextmanager
    async def claimed(
        self,
        key: ContentKey,
        file_tags: tuple[bytes, ...] = (),
        waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> AsyncIterator[Claim]:
        """Enters the block with rows that were found or with the claim to encode them.

        Call it for a key that the shared cache did not have a moment ago. `file_tags`: those of the image's files, by
        which an operator's removal finds the encode. Waits inside `waiting()` while another
        replica encodes. There and in the block the caller may be cancelled, and nowhere else: a lease that is being
        acquired would be lost. The block sets `Claim.stored` after encoding; its exceptions are announced as a failure
        and pass through.
        """
        give_up_s = time.monotonic() + _MAX_WAIT_LIVES * self._leases.ttl_s
        has_waited = False
        # An encode of this key that was dropped a moment ago gives its lease back first.
        if key.value in self._releases:
            await asyncio.wait([self._releases[key.value]])
        while time.monotonic() < give_up_s:
            attempt = await run_in_thread(self._threads, self._leases.acquire, key, file_tags)
            if attempt.state is LeaseState.UNAVAILABLE:
                break
            if attempt.state is LeaseState.HELD:
                async with self._held(key, attempt.token, has_waited=has_waited) as claim:
                    yield claim
                return
            has_waited = True
            with waiting():
                found, must_encode = await self._follow(key, attempt)
            if found is not None:
                self._metrics.coalesced.labels("fleet").inc()
                yield Claim(found=found, has_waited=True)
                return
            if must_encode:
                break
        # Encode without a lease.
        yield Claim()

    async def close(self) -> None:
        """Gives held leases back and waits for that."""
        await asyncio.gather(*self._releases.values(), return_exceptions=True)
        await self._done.close()
        await asyncio.to_thread(self._threads.shutdown)

    @contextlib.asynccontextmanager
    async def _held(self, key: ContentKey, token: bytes, *, has_waited: bool) -> AsyncIterator[Claim]:
        """Keeps the lease alive during the block, then releases it and announces the outcome."""
        claim = Claim(token, has_waited=has_waited)
        try:
            async with self._renewed(key, token):
                # The previous holder may have ended between the last look and the lease.
                claim.found = await self._find(key)
                if claim.found is None and has_waited:
                    self._metrics.lease_takeovers.inc()
                yield claim
        finally:
            # A task of its own, because the caller need not wait: its outcome is known.
            release = asyncio.create_task(
                run_in_thread(self._threads, self._leases.release, key, token, claim.announcement)
            )
            self._releases[key.value] = release
            release.add_done_callback(lambda done: self._forget_release(key, done))

    def _forget_release(self, key: ContentKey, release: asyncio.Task[bool]) -> None:
        if self._releases.get(key.value) is release:
            del self._releases[key.value]

    async def _follow(self, key: ContentKey, attempt: LeaseAttempt) -> tuple[EmbeddingMeta | None, bool]:
        """Waits for the holder's end, or for as long as its lease lasts, but not longer than `_RETRY_S`.

        Returns the rows that were found, and whether to encode without a lease.
        """
        until_s = time.monotonic() + min(max(attempt.remaining_s, _LOOK_UNHEARD_S), _RETRY_S)
        async with self._done.listening(key) as listener:
            while True:
                # Only after the subscription, so that an end in between is not missed.
                found = await self._find(key)
                if found is not None:
                    return found, False
                if listener.outcome is not None:
                    # Rows that cannot be stored help no other replica, and one lease after the other would be a queue.
                    return None, listener.outcome == _NOT_STORED
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None, False
                await listener.wait(min(left_s, _LOOK_S if self._done.is_connected else _LOOK_UNHEARD_S))

    @contextlib.asynccontextmanager
    async def _renewed(self, key: ContentKey, token: bytes) -> AsyncIterator[None]:
        """Renews the lease as long as the block runs and the model answers."""
        heartbeat = asyncio.create_task(self._renew_forever(key, token))
        try:
            yield
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)

    async def _renew_forever(self, key: ContentKey, token: bytes) -> None:
        while True:
            await asyncio.sleep(self._leases.ttl_s / _RENEWALS_PER_LIFE)
            if self._is_answering():
                await run_in_thread(self._threads, self._leases.renew, key, token)
