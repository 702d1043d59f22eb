"""Resolves the images of a prompt to content keys and sizes. Reads neither embedding rows nor pixels.

Image bytes are hashed and their header is read. A digest is looked up in the shared cache's metadata, then at the
encoder. Keys are always derived here, from the fingerprint of the encoder that is in service now.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from decoder_svc.prompt.preparation_threads import PreparationThreads, caller_of
from decoder_svc.prompt.prompt_builder import ResolvedImage
from decoder_svc.prompt.prompt_spec import CachedImage, FileFacts, ImageSource, InlineImage
from decoder_svc.rows.encoder_client import EncoderClient
from lookonce import tracing
from lookonce.content_key import (
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    Tenant,
    content_key,
)
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.errors import (
    DigestMismatchError,
    EmbeddingNotCachedError,
    FingerprintMismatchError,
    UnavailableError,
    located_in_image,
)
from lookonce.image_file import file_digest, files_of
from lookonce.media.image_header import ImageLimits, check_file_size, probe_file
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.item_turns import ItemTurns, Place

# Look-ups at the encoder at a time.
_NUM_ENCODER_LOOKUPS = 16


class MetadataSource(Protocol):
    """The part of the shared cache that image resolution uses."""

    def metadata(self, key: ContentKey) -> EmbeddingMeta | None:
        """Returns the shape of an image's rows; None for an unknown image. Blocks; never raises."""
        ...


class ImageResolver:
    """Resolves all images of a prompt concurrently. Use it on the event loop."""

    def __init__(
        self,
        encoder: EncoderClient | None,
        metadata: MetadataSource | None,
        limits: ImageLimits,
        threads: PreparationThreads,
    ) -> None:
        self._encoder = encoder
        self._metadata = metadata
        self._limits = limits
        self._threads = threads
        self._item_turns = ItemTurns()
        # Look-ups at the encoder have turns of their own: it may be slow, and hits in the shared cache need not wait.
        self._encoder_turns = ItemTurns(_NUM_ENCODER_LOOKUPS)

    async def resolve(self, sources: Sequence[ImageSource], tenant: Tenant, request_id: str) -> list[ResolvedImage]:
        """Returns one resolved image per source, in order. Each file and each look-up takes a turn of its own.

        Raises the first of DigestMismatchError, ImageUndecodableError, ImageTooLargeError (each with the image's index
        in its metadata), FingerprintMismatchError and UnavailableError. If the only problem is unknown digests, raises
        EmbeddingNotCachedError with the indexes of all of them.
        """
        if not sources:
            return []
        for index, source in enumerate(sources):
            if isinstance(source, InlineImage):
                with located_in_image(index):
                    for file in files_of(source.data):
                        check_file_size(file, self._limits)
        with tracing.span("generate.lookup", num_images=len(sources)):
            return await self._resolve_all(sources, tenant, caller_of(tenant, request_id))

    async def _resolve_all(
        self, sources: Sequence[ImageSource], tenant: Tenant, caller: CallerId
    ) -> list[ResolvedImage]:
        fingerprint = await self._fingerprint()
        found = await self._item_turns.run_all(
            caller,
            (
                functools.partial(self._resolve, index, source, fingerprint, tenant, caller)
                for index, source in enumerate(sources)
            ),
        )
        resolved = [result for result in found if isinstance(result, ResolvedImage)]
        missing = [index for index, result in enumerate(found) if isinstance(result, EmbeddingNotCachedError)]
        failures = [
            result
            for result in found
            if isinstance(result, BaseException) and not isinstance(result, EmbeddingNotCachedError)
        ]
        # The traceback of an exception refers to the frame that raises it. A reference back would be a cycle, which
        # keeps the images in memory until the next garbage collection.
        found.clear()
        if failures:
            raise failures.pop(0)
        if missing:
            raise EmbeddingNotCachedError(
                f"{len(missing)} of {len(sources)} images are not cached; send their bytes", indexes=missing
            )
        return resolved

    async def _resolve(
        self,
        index: int,
        source: ImageSource,
        fingerprint: EncoderFingerprint,
        tenant: Tenant,
        caller: CallerId,
        place: Place,
    ) -> ResolvedImage:
        if isinstance(source, InlineImage):
            facts = source.facts
            if facts is None:
                place.give_back()
                with located_in_image(index):
                    facts = await self._threads.read_file(caller, _inspect, source, self._limits)
            key, header = content_key(facts.digest, fingerprint, source.options, tenant), facts.header
            return ResolvedImage(
                key,
                header.width,
                header.height,
                source.options,
                source.data,
                num_file_pixels=header.num_pixels,
            )
        return await self._resolve_cached(source, fingerprint, tenant, caller, place)

    async def _resolve_cached(
        self, source: CachedImage, fingerprint: EncoderFingerprint, tenant: Tenant, caller: CallerId, place: Place
    ) -> ResolvedImage:
        if source.fingerprint is not None and source.fingerprint != fingerprint:
            raise FingerprintMismatchError(
                "the key names another encoder fingerprint than the one served here; leave it empty or ask GetModelInfo"
            )
        key = content_key(source.digest, fingerprint, source.options, tenant)
        meta = await self._stored_meta(key, source.options, caller, place)
        if meta is None:
            raise EmbeddingNotCachedError("the image is not cached; send its bytes")
        return ResolvedImage(key, meta.image_width, meta.image_height, source.options, None, meta.num_rows)

    async def _stored_meta(
        self, key: ContentKey, options: ProcessorOptions, caller: CallerId, place: Place
    ) -> EmbeddingMeta | None:
        if self._metadata is not None:
            meta = await self._threads.look_up(caller, self._metadata.metadata, key)
            if meta is not None:
                return meta
        if self._encoder is None:
            return None
        place.give_back()
        async with self._encoder_turns.place(caller):
            return await self._encoder.lookup(key, options)

    async def _fingerprint(self) -> EncoderFingerprint:
        if self._encoder is None:
            raise UnavailableError("this decoder has no encoder service; it answers text prompts only")
        return (await self._encoder.info()).fingerprint


def _inspect(source: InlineImage, limits: ImageLimits) -> FileFacts:
    digest = file_digest(source.data)
    if source.expected_digest is not None and source.expected_digest != digest:
        raise DigestMismatchError("the image's bytes do not hash to its expected_digest; send them again")
    return FileFacts(digest, probe_file(source.data, limits))
