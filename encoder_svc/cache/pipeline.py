"""The encoder's one path: hash → local cache → single flight → shared cache → lease → encode → store.

The methods of `EncodePipeline` stand in the order in which an image passes them: `encode` makes an EncodeJob, and the
next three hand it on. Plain Python types in and out; knows neither protobuf nor gRPC. Lives on one event
loop; everything over a millisecond (hashing photos, pixels, the model, Redis) happens in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from encoder_svc.cache.cache_tiers import CachedRows, CacheTiers, not_cached
from encoder_svc.cache.encode_job import CachePolicy, EncodeJob, EncodeOutcome, ImageInput, Origin
from encoder_svc.cache.fleet_flight import FleetFlight
from encoder_svc.cache.image_encoder import ImageEncoder
from encoder_svc.cache.removals import EncodeInProgress
from encoder_svc.cache.single_flight import Flight, SingleFlight
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ContentKey, ImageDigest, ProcessorOptions, Tenant, content_key, file_tag
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.errors import DigestMismatchError, FingerprintMismatchError, InvalidParameterError, LookonceError
from lookonce.image_file import FileDigests, ImageFile, file_digests, files_of, num_file_bytes
from lookonce.media.image_header import ImageLimits, check_file_size, probe_file
from lookonce.turns.caller_order import CallerOrder, Turn
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.item_turns import ItemTurns, Place
from lookonce.uncounted_rows import UncountedRows

# SHA-256 of 64 KiB takes about a quarter of a millisecond without hardware support. Larger files go to a thread.
_INLINE_HASH_BYTES = 64 << 10


class EncodePipeline:
    """Finds or makes the rows of images. One per process, used by all calls."""

    def __init__(
        self,
        model: VisionModel,
        encoder: ImageEncoder,
        tiers: CacheTiers,
        fleet: FleetFlight | None,
        limits: ImageLimits,
        metrics: EncoderMetrics,
    ) -> None:
        """Owns `encoder`, `tiers` and `fleet`. `fleet` None: without a shared cache, replicas cannot share the work."""
        self.model = model
        self.tiers = tiers
        self.metrics = metrics
        # The items are images, and groups of keys that are looked up.
        self.item_turns = ItemTurns()
        self._encoder = encoder
        self._fleet = fleet
        self._limits = limits
        self._order: CallerOrder[CallerId] = CallerOrder()
        # By (cache key, whether it is a refresh).
        self._flights: SingleFlight[EncodeOutcome] = SingleFlight()
        # Rows computed here whose outcome no caller has taken as COMPUTED yet.
        self._uncounted = UncountedRows()

    @property
    def is_healthy(self) -> bool:
        """Whether forward passes end, and do not all fail."""
        return self._encoder.is_healthy

    @property
    def has_died(self) -> bool:
        """Whether only a new process helps."""
        return self._encoder.has_died

    async def encode(
        self,
        image: ImageInput,
        cache_policy: CachePolicy,
        tenant: Tenant,
        request_id: str,
        charge_pixels: Callable[[int], None] | None = None,
        place: Place | None = None,
    ) -> EncodeOutcome:
        """Makes sure that the image's rows can be read from a cache, or from the outcome if it was removed meanwhile.

        Images of one tenant's `request_id` are encoded in the order of these calls and take turns with others; an image
        that several callers ask for has the turn of the first. When all of them have left, an image that waits is
        dropped, and one that is being decoded or encoded is finished.

        One outcome of each encode is COMPUTED, so that callers can add up what was computed: that of the caller who
        began it, or if it has left, of the next caller with the image's bytes, who waits already or comes later.

        `charge_pixels`, if given, is called with the number of pixels that the header of an image claims, before the
        image is looked up. It may raise a refusal. `place` is one of `item_turns` for this image, taken or not. Hashing
        and look-ups wait for it; it is given back when the image waits for others, and at the end.

        Raises EmbeddingNotCachedError for a reference (or with ONLY_IF_CACHED) that no cache holds,
        DigestMismatchError, InvalidParameterError, and the errors of `ImageEncoder.encode`.
        """
        if image.removal_token is None:
            image = replace(image, removal_token=self.tiers.removals.heard_token)
        caller = CallerId(tenant.tag, request_id)
        async with place or self.item_turns.place(caller) as held:
            return await self._encode_in_turn(image, cache_policy, tenant, caller, charge_pixels, held)

    async def _encode_in_turn(
        self,
        image: ImageInput,
        cache_policy: CachePolicy,
        tenant: Tenant,
        caller: CallerId,
        charge_pixels: Callable[[int], None] | None,
        place: Place,
    ) -> EncodeOutcome:
        with self._order.entered(caller) as turn:
            self.model.adapter.check_options(image.options)
            self.model.adapter.check_files(image.data)
            if image.data is None and cache_policy is CachePolicy.REFRESH:
                raise InvalidParameterError("cache_policy", "a refresh needs the image's bytes, not a reference")
            digests = await self._digests_of(image, turn, place)
            key = self.key_of(digests.digest, image.options, tenant)
            if image.data is None or cache_policy is CachePolicy.ONLY_IF_CACHED:
                turn.pass_on()
                return await self._find(key, place)
            if charge_pixels is not None:
                async with place.left():
                    num_pixels = await self._encoder.readers.run(turn, _num_pixels, image.data, self._limits)
                charge_pixels(num_pixels)
            tags = tuple(file_tag(file, tenant) for file in digests.files)
            job = EncodeJob(key, image.data, tags, image.options, cache_policy, image.removal_token, turn)
            if not job.refresh and (found := await self._find_local(key)) is not None:
                return self._counted(found)
            place.give_back()
            return self._counted(await self._join_or_start(job))

    async def _join_or_start(self, job: EncodeJob) -> EncodeOutcome:
        """Joins the work on this key that is in flight, or starts it; a refresh joins refreshes only."""
        name = (job.key.value, job.refresh)
        if name not in self._flights:
            return await self._flights.start(name, self._fly, job)
        self.metrics.coalesced.labels("process").inc()
        job.turn.pass_on()
        return await self._flights.join(name)

    async def _fly(self, flight: Flight, job: EncodeJob) -> EncodeOutcome:
        """Runs once per flight: ends with rows that may be counted by one caller if they were computed here."""
        async with self.tiers.encoding(job.key, job.file_tags, job.arrival_token) as encode:
            outcome = await self._find_or_encode(flight, job, encode)
        if not encode.is_forgotten:
            outcome = replace(outcome, rows=None)
        elif outcome.rows is not None:
            # No cache keeps them, or not for long: a removal that came during the write finds them.
            outcome = replace(outcome, stored=False)
        if outcome.origin is Origin.COMPUTED:
            # Nothing is awaited from here on, so the caller who began the flight is the first to wake up.
            self._uncounted.add(job.key.value, outcome.meta.num_rows)
        return _as_joined(outcome)

    def _counted(self, outcome: EncodeOutcome) -> EncodeOutcome:
        """Makes the outcome COMPUTED if an encode of these rows has no caller yet who counts it."""
        is_open = self._uncounted.take(outcome.key.value, outcome.meta.num_rows) > 0
        return replace(outcome, origin=Origin.COMPUTED) if is_open else outcome

    async def _find_or_encode(self, flight: Flight, job: EncodeJob, encode: EncodeInProgress) -> EncodeOutcome:
        """Takes the rows from the shared cache or from another replica, else encodes."""
        if job.refresh:
            return await self._encode(flight, job, encode)
        place = self.item_turns.place(job.turn.caller)
        with flight.waiting():
            await place.take()
        async with place:
            found = await self._find_shared(job.key)
        if found is not None:
            return found
        if self._fleet is None:
            return await self._encode(flight, job, encode)
        async with self._fleet.claimed(job.key, job.file_tags, flight.waiting) as claim:
            if claim.found is not None:
                origin = Origin.COALESCED if claim.has_waited else Origin.SHARED_CACHE
                return EncodeOutcome(job.key, claim.found, origin, 0.0, stored=True)
            self.tiers.removals.hold(encode, claim.lease_token)
            outcome = await self._encode(flight, job, encode)
            claim.stored = outcome.stored
            return outcome

    async def _encode(self, flight: Flight, job: EncodeJob, encode: EncodeInProgress) -> EncodeOutcome:
        """Runs the model and puts the rows into both caches, unless the image was removed meanwhile."""
        entry = await self._encoder.encode(job, flight)
        stored = await self.tiers.put(job.key, entry, refresh=job.refresh, encode=encode)
        return EncodeOutcome(job.key, entry.meta, Origin.COMPUTED, entry.encode_s, stored, entry.rows)

    async def lookup(self, keys: Sequence[ContentKey], *, touch: bool) -> list[EmbeddingMeta | None]:
        """The description of each key's rows, None where no cache holds them; `touch` prolongs their lives."""
        return await self.tiers.lookup(keys, touch=touch)

    async def read(self, key: ContentKey, row_offset: int, row_count: int) -> CachedRows:
        """Rows [row_offset, row_offset + row_count) of one embedding, to its end for a count of 0.

        Raises EmbeddingNotCachedError, or InvalidParameterError for a range outside of the embedding.
        """
        return await self.tiers.read(key, row_offset, row_count)

    def key_of(self, digest: ImageDigest, options: ProcessorOptions, tenant: Tenant) -> ContentKey:
        """The key under which this encoder keeps an image."""
        return content_key(digest, self.model.fingerprint, options, tenant)

    def check_fingerprint(self, fingerprint: str) -> None:
        """Raises FingerprintMismatchError unless the fingerprint is empty or this encoder's."""
        if fingerprint and fingerprint != self.model.fingerprint:
            raise FingerprintMismatchError(
                "the rows of another encoder were asked for; ask GetEncoderInfo which one is served here",
                metadata={"encoder_fingerprint": self.model.fingerprint},
            )

    async def close(self) -> None:
        """Cancels the work in flight and stops all threads."""
        await self._flights.close()
        if self._fleet is not None:
            await self._fleet.close()
        for part in (self._encoder, self.tiers):
            await asyncio.to_thread(part.close)

    async def _digests_of(self, image: ImageInput, turn: Turn[CallerId], place: Place) -> FileDigests:
        """Returns the digests of the image's bytes, or the digest of a reference.

        Raises DigestMismatchError if the bytes have another digest than the one they were sent with.
        """
        if image.data is None:
            assert image.digest is not None, "a reference has a digest"
            return FileDigests(image.digest, ())
        for file in files_of(image.data):
            check_file_size(file, self._limits)
        if num_file_bytes(image.data) <= _INLINE_HASH_BYTES:
            digests = file_digests(image.data)
        else:
            async with place.left():
                digests = await self._encoder.readers.run(turn, file_digests, image.data)
        if image.digest is not None and digests.digest != image.digest:
            raise DigestMismatchError("the image does not hash to its expected digest; nothing was stored")
        return digests

    async def _find(self, key: ContentKey, place: Place) -> EncodeOutcome:
        """Never encodes, but waits for an encode that is in flight. Raises EmbeddingNotCachedError."""
        found = await self._find_local(key)
        if found is None:
            found = await self._find_in_flight(key, place)
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
        # The image may have been removed meanwhile, and its copy with it.
        return EncodeOutcome(key, entry.meta, Origin.LOCAL_CACHE, 0.0, stored, None if stored else entry.rows)

    async def _find_in_flight(self, key: ContentKey, place: Place) -> EncodeOutcome | None:
        """None also when the encode in flight fails: the error concerns those who sent the bytes.

        None, too, after the image was removed: only requests with the bytes may get its rows.
        """
        name = (key.value, False)
        if name not in self._flights or self.tiers.removals.is_forgotten(key):
            return None
        self.metrics.coalesced.labels("process").inc()
        place.give_back()
        try:
            return await self._flights.join(name)
        except LookonceError:
            await place.take()
            return None

    async def _find_shared(self, key: ContentKey) -> EncodeOutcome | None:
        meta = await self.tiers.find_shared(key)
        return None if meta is None else EncodeOutcome(key, meta, Origin.SHARED_CACHE, 0.0, stored=True)


def _num_pixels(data: ImageFile, limits: ImageLimits) -> int:
    """The pixels that the files of an image claim in all. Raises the errors of `probe_file`."""
    return probe_file(data, limits).num_pixels * len(files_of(data))


def _as_joined(outcome: EncodeOutcome) -> EncodeOutcome:
    """The outcome for callers that do not count the encode: COALESCED instead of COMPUTED; a hit stays a hit."""
    return replace(outcome, origin=Origin.COALESCED) if outcome.origin is Origin.COMPUTED else outcome
