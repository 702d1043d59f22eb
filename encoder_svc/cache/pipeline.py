"""One image from bytes or digest to rows in the cache: hash → look up → single flight → preprocess → batch → store.

Plain Python types in and out; knows neither protobuf nor gRPC. Lives on one event loop; everything over a millisecond
(hashing photos, pixels, the model, Redis) happens in threads.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from encoder_svc.cache.cache_tiers import CacheTiers, RowRange, not_cached
from encoder_svc.cache.fleet_flight import FleetFlight
from encoder_svc.cache.local_cache import LocalEmbedding
from encoder_svc.cache.single_flight import SingleFlight
from encoder_svc.images.prepared_room import PreparedRoom
from encoder_svc.images.preprocess import Preprocessor
from encoder_svc.images.quarantine import Quarantine
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.batcher import ForwardBatcher
from encoder_svc.vision.forward_queue import CallerId, EncodedRows
from encoder_svc.vision.vision_model import VisionModel, row_bytes
from lookonce import tracing
from lookonce.caller_order import CallerOrder, Turn
from lookonce.content_key import ContentKey, ImageDigest, ProcessorOptions, Tenant, content_key
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.errors import (
    DigestMismatchError,
    FingerprintMismatchError,
    ImagePoisonousError,
    InvalidParameterError,
    LookonceError,
    OverloadedError,
)
from lookonce.image_file import ImageFile, file_digest, files_of, num_file_bytes
from lookonce.media.image_header import ImageHeader, ImageLimits, check_file_size

# SHA-256 of so many bytes takes about a quarter of a millisecond without hardware help; more goes to a thread.
_INLINE_HASH_BYTES = 64 << 10


class CacheUse(enum.Enum):
    """What a request wants from the cache."""

    READ_AND_WRITE = "read_and_write"
    # Encode again and overwrite.
    REFRESH = "refresh"
    # Never encode.
    ONLY_IF_CACHED = "only_if_cached"


class Origin(enum.Enum):
    """Where a result came from."""

    COMPUTED = "computed"
    COALESCED = "coalesced"
    LOCAL_CACHE = "local_cache"
    SHARED_CACHE = "shared_cache"


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image of a request. At least one of `data` and `digest` is set."""

    # The original file, or a pair of video frames; None for a reference by digest.
    data: ImageFile | None = field(repr=False)
    # With `data`: what it must hash to. Without: which image is meant.
    digest: ImageDigest | None
    options: ProcessorOptions


@dataclass(frozen=True, slots=True)
class EncodeOutcome:
    """What became of one image."""

    key: ContentKey
    meta: EmbeddingMeta
    origin: Origin
    # Duration of the forward pass, seconds; 0 for a hit.
    compute_s: float
    # The shared cache holds the rows.
    stored: bool


class EncodePipeline:
    """The encoder's one path; owned by the process, used by all calls."""

    def __init__(
        self,
        model: VisionModel,
        preprocessor: Preprocessor,
        batcher: ForwardBatcher,
        tiers: CacheTiers,
        limits: ImageLimits,
        metrics: EncoderMetrics,
        *,
        max_queued_images: int,
        room: PreparedRoom,
        quarantine: Quarantine,
        fleet: FleetFlight[EncodeOutcome] | None,
    ) -> None:
        """`max_queued_images` bounds the images between a miss and the end of their forward pass, `room` their pixels.

        `quarantine` holds the keys of images on which the model fails; a key says options and tenant, too.
        `fleet` None: there is no shared cache over which replicas could agree.
        """
        self.model = model
        self._preprocessor = preprocessor
        self._batcher = batcher
        self.tiers = tiers
        self._limits = limits
        self.metrics = metrics
        self._max_queued_images = max_queued_images
        self._num_queued = 0
        self._room = room
        self._flights: SingleFlight[EncodeOutcome] = SingleFlight()
        self._order: CallerOrder[CallerId] = CallerOrder()
        self._quarantine = quarantine
        self._fleet = fleet

    @property
    def is_healthy(self) -> bool:
        """Whether the model answers."""
        return self._batcher.is_healthy

    @property
    def has_died(self) -> bool:
        """Whether only a new process helps."""
        return self._batcher.has_died

    def key_of(self, digest: ImageDigest, options: ProcessorOptions, tenant: Tenant) -> ContentKey:
        """The key under which this encoder keeps an image."""
        return content_key(digest, self.model.fingerprint, options, tenant)

    def check_fingerprint(self, fingerprint: str) -> None:
        """Raises FingerprintMismatchError unless it is empty or this encoder's."""
        if fingerprint and fingerprint != self.model.fingerprint:
            raise FingerprintMismatchError(
                "the rows of another encoder were asked for; ask GetEncoderInfo which one is served here",
                metadata={"encoder_fingerprint": self.model.fingerprint},
            )

    async def encode(self, image: ImageInput, cache_use: CacheUse, tenant: Tenant, caller: CallerId) -> EncodeOutcome:
        """Makes sure that the image's rows can be read from a cache.

        Images of one `caller` are encoded in the order of these calls and take turns with those of others; an image
        that several ask for has the turn of the first.
        Raises EmbeddingNotCachedError for a reference (or with ONLY_IF_CACHED) that no cache holds, OverloadedError,
        DigestMismatchError, InvalidParameterError, the image errors of `image_header` and `preprocess`, and
        ImagePoisonousError for an image on which the model fails.
        """
        with self._order.entered(caller) as turn:
            return await self._find_or_fly(image, cache_use, tenant, turn)

    async def _find_or_fly(
        self, image: ImageInput, cache_use: CacheUse, tenant: Tenant, turn: Turn[CallerId]
    ) -> EncodeOutcome:
        self.model.adapter.check_options(image.options)
        if image.data is None:
            turn.pass_on()
            if cache_use is CacheUse.REFRESH:
                raise InvalidParameterError("cache_policy", "a refresh needs the image's bytes, not a reference")
            assert image.digest is not None, "a reference has a digest"
            return await self._find(self.key_of(image.digest, image.options, tenant))
        digest = await self._checked_digest(image.data, image.digest)
        key = self.key_of(digest, image.options, tenant)
        if cache_use is CacheUse.ONLY_IF_CACHED:
            turn.pass_on()
            return await self._find(key)
        if cache_use is CacheUse.READ_AND_WRITE and (found := await self._find_local(key)) is not None:
            return found
        is_refresh = cache_use is CacheUse.REFRESH
        return await self._fly(key, image.data, image.options, turn, refresh=is_refresh)

    async def lookup(self, keys: Sequence[ContentKey], *, touch: bool) -> list[EmbeddingMeta | None]:
        """The description of each key's rows, None where no cache holds them; `touch` prolongs their lives."""
        return await self.tiers.lookup(keys, touch=touch)

    async def read(self, key: ContentKey, row_offset: int, row_count: int) -> RowRange:
        """Rows [row_offset, row_offset + row_count) of one embedding, to its end for a count of 0.

        Raises EmbeddingNotCachedError, or InvalidParameterError for a range outside of the embedding.
        """
        return await self.tiers.read(key, row_offset, row_count)

    async def close(self) -> None:
        """Cancels what is in flight and stops all threads."""
        await self._flights.close()
        if self._fleet is not None:
            await self._fleet.close()
        for part in (self._preprocessor, self._batcher, self.tiers):
            await asyncio.to_thread(part.close)

    async def _checked_digest(self, data: ImageFile, expected: ImageDigest | None) -> ImageDigest:
        for file in files_of(data):
            check_file_size(file, self._limits)
        if num_file_bytes(data) <= _INLINE_HASH_BYTES:
            digest = file_digest(data)
        else:
            digest = await asyncio.to_thread(file_digest, data)
        if expected is not None and digest != expected:
            raise DigestMismatchError("the image does not hash to its expected digest; nothing was stored")
        return digest

    async def _find(self, key: ContentKey) -> EncodeOutcome:
        """Never encodes, but waits for an encode that is in flight. Raises EmbeddingNotCachedError."""
        found = await self._find_local(key)
        if found is None and key.value in self._flights:
            found = await self._join(key)
        if found is None:
            found = await self._find_shared(key)
        if found is None:
            raise not_cached()
        return found

    async def _find_local(self, key: ContentKey) -> EncodeOutcome | None:
        entry = self.tiers.find_local(key)
        if entry is None:
            return None
        stored = await self.tiers.keep_stored(key, entry)
        return EncodeOutcome(key, entry.meta, Origin.LOCAL_CACHE, 0.0, stored)

    async def _find_shared(self, key: ContentKey) -> EncodeOutcome | None:
        meta = await self.tiers.find_shared(key)
        return None if meta is None else EncodeOutcome(key, meta, Origin.SHARED_CACHE, 0.0, stored=True)

    async def _join(self, key: ContentKey) -> EncodeOutcome | None:
        """The outcome of the flight that exists for this key; its failure belongs to those who sent the bytes."""
        self.metrics.coalesced.labels("process").inc()
        try:
            return _as_joined(await self._flights.join(key.value))
        except LookonceError:
            return None

    async def _fly(
        self, key: ContentKey, data: ImageFile, options: ProcessorOptions, turn: Turn[CallerId], *, refresh: bool
    ) -> EncodeOutcome:
        """Joins the flight of this key or starts one; a refresh joins refreshes only."""
        flight = (key.value, "refresh") if refresh else key.value
        if flight in self._flights:
            self.metrics.coalesced.labels("process").inc()
            turn.pass_on()
            return _as_joined(await self._flights.join(flight))

        async def encode() -> EncodeOutcome:
            return await self._encode(key, data, options, turn, overwrite=refresh)

        work = encode() if refresh else self._find_or_encode(key, encode)
        return await self._flights.start(flight, work)

    async def _find_or_encode(self, key: ContentKey, encode: Callable[[], Awaitable[EncodeOutcome]]) -> EncodeOutcome:
        """Looks into the shared cache, then agrees with the other replicas on who encodes."""
        found = await self._find_shared(key)
        if found is not None:
            return found
        if self._fleet is None:
            return await encode()
        outcome, was_elsewhere = await self._fleet.run(key, lambda: self._find_shared(key), encode)
        return replace(outcome, origin=Origin.COALESCED) if was_elsewhere else outcome

    async def _encode(
        self, key: ContentKey, data: ImageFile, options: ProcessorOptions, turn: Turn[CallerId], *, overwrite: bool
    ) -> EncodeOutcome:
        self._quarantine.check(key.value)
        self._admit()
        admitted_s = time.monotonic()
        try:
            self._batcher.check_answering()
            async with self._room.entered(turn.caller) as place:
                with self._batcher.expecting():
                    inputs, header = await self._preprocessor.prepare(data, key.digest, options)
                    place.holds(inputs.size_bytes)
                    await turn.wait()
                    submitted = self._batcher.submit(inputs, turn.caller, turn.number)
                    turn.pass_on()
                # The queue's alone now, which lets go of the pixels when their pass ends.
                del inputs
                encoded = await self._judged(key, submitted)
            self.metrics.queue_seconds.observe(max(0.0, time.monotonic() - admitted_s - encoded.compute_s))
        finally:
            self._num_queued -= 1
            self.metrics.queued_images.set(self._num_queued)
        entry = LocalEmbedding(self._meta_of(encoded, header), row_bytes(encoded.rows), encoded.compute_s)
        stored = await self.tiers.put(key, entry, overwrite=overwrite)
        return EncodeOutcome(key, entry.meta, Origin.COMPUTED, encoded.compute_s, stored)

    async def _judged(self, key: ContentKey, submitted: Future[EncodedRows]) -> EncodedRows:
        """Waits for the model and remembers images on which it fails."""
        try:
            encoded = await asyncio.wrap_future(submitted)
        except ImagePoisonousError:
            self._quarantine.strike(key.value)
            raise
        self._quarantine.absolve(key.value)
        # One for each image of a pass, in the trace of the call that brought it.
        tracing.record(
            "encode.forward",
            encoded.began_s,
            encoded.began_s + encoded.compute_s,
            num_rows=encoded.rows.shape[0],
            num_images=encoded.num_together,
        )
        return encoded

    def _admit(self) -> None:
        """Takes a place among the queued images. Raises OverloadedError when there is none."""
        if self._num_queued >= self._max_queued_images:
            raise OverloadedError(f"{self._num_queued} images wait for the model, which is the limit; try again later")
        self._num_queued += 1
        self.metrics.queued_images.set(self._num_queued)

    def _meta_of(self, encoded: EncodedRows, header: ImageHeader) -> EmbeddingMeta:
        return EmbeddingMeta(
            num_rows=encoded.rows.shape[0],
            hidden_size=self.model.hidden_size,
            num_levels=self.model.num_levels,
            dtype=self.model.row_dtype,
            image_width=header.width,
            image_height=header.height,
        )


def _as_joined(outcome: EncodeOutcome) -> EncodeOutcome:
    """What a caller sees who did not start the flight; a hit stays a hit."""
    return replace(outcome, origin=Origin.COALESCED) if outcome.origin is Origin.COMPUTED else outcome
