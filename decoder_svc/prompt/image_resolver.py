"""Resolves the images of a prompt to content keys and sizes. Reads neither embedding rows nor pixels.

Image bytes are hashed and their header is read. Digests are looked up together (reference_resolver.py). Keys are always
derived in the decoder, from the fingerprint of the encoder that is in service now.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from decoder_svc.prompt.preparation_threads import PreparationThreads, caller_of
from decoder_svc.prompt.prompt_builder import ResolvedImage
from decoder_svc.prompt.prompt_spec import CachedImage, FileFacts, ImageSource, InlineImage
from decoder_svc.prompt.reference_resolver import MetadataSource, Outcome, ReferenceResolver
from decoder_svc.rows.encoder_client import EncoderClient
from lookonce import tracing
from lookonce.content_key import (
    EncoderFingerprint,
    Tenant,
    content_key,
)
from lookonce.errors import (
    DigestMismatchError,
    EmbeddingNotCachedError,
    UnavailableError,
    located_in_image,
)
from lookonce.image_file import file_digest, files_of
from lookonce.media.image_header import ImageLimits, check_file_size, probe_file
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.item_turns import ItemTurns, Place


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
        self._limits = limits
        self._threads = threads
        self._item_turns = ItemTurns()
        self._references = ReferenceResolver(encoder, metadata, threads)

    async def resolve(self, sources: Sequence[ImageSource], tenant: Tenant, request_id: str) -> list[ResolvedImage]:
        """Returns one resolved image per source, in order. Each file and each group of digests takes a turn of its own.

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
        # Positions of the sources of each item: one for each file, and one for all digests together.
        positions: list[list[int]] = []
        items: list[Callable[[Place], Coroutine[Any, Any, list[Outcome]]]] = []
        digests: dict[int, CachedImage] = {}
        for index, source in enumerate(sources):
            if isinstance(source, CachedImage):
                digests[index] = source
            else:
                positions.append([index])
                items.append(functools.partial(self._read, index, source, fingerprint, tenant, caller))
        costs = [1] * len(items)
        if digests:
            positions.append(list(digests))
            items.append(functools.partial(self._references.resolve, [*digests.values()], fingerprint, tenant, caller))
            costs.append(self._references.cost(len(digests)))
        if len(items) == 1:
            results = [await self._item_turns.run_one(caller, items[0], costs[0])]
        else:
            results = await self._item_turns.run_all(caller, items, costs)
        found = _by_source(positions, results)
        resolved = [outcome for outcome in found if isinstance(outcome, ResolvedImage)]
        missing = [index for index, outcome in enumerate(found) if outcome is None]
        failures = [outcome for outcome in found if isinstance(outcome, BaseException)]
        # The traceback of an exception refers to the frame that raises it. A reference back would be a cycle, which
        # keeps the images in memory until the next garbage collection.
        results.clear()
        found.clear()
        if failures:
            raise failures.pop(0)
        if missing:
            raise EmbeddingNotCachedError(
                f"{len(missing)} of {len(sources)} images are not cached; send their bytes", indexes=missing
            )
        return resolved

    async def _read(
        self,
        index: int,
        source: InlineImage,
        fingerprint: EncoderFingerprint,
        tenant: Tenant,
        caller: CallerId,
        place: Place,
    ) -> list[Outcome]:
        facts = source.facts
        if facts is None:
            place.give_back()
            with located_in_image(index):
                facts = await self._threads.read_file(caller, _inspect, source, self._limits)
        key, header = content_key(facts.digest, fingerprint, source.options, tenant), facts.header
        return [
            ResolvedImage(
                key,
                header.width,
                header.height,
                source.options,
                source.data,
                num_file_pixels=header.num_pixels,
            )
        ]

    async def _fingerprint(self) -> EncoderFingerprint:
        if self._encoder is None:
            raise UnavailableError("this decoder has no encoder service; it answers text prompts only")
        return (await self._encoder.info()).fingerprint


def _inspect(source: InlineImage, limits: ImageLimits) -> FileFacts:
    digest = file_digest(source.data)
    if source.expected_digest is not None and source.expected_digest != digest:
        raise DigestMismatchError("the image's bytes do not hash to its expected_digest; send them again")
    return FileFacts(digest, probe_file(source.data, limits))


def _by_source(positions: Sequence[Sequence[int]], results: Sequence[list[Outcome] | BaseException]) -> list[Outcome]:
    """Returns the outcomes in the order of the sources. An item that failed has failed for all of its sources."""
    found: dict[int, Outcome] = {}
    for indexes, result in zip(positions, results, strict=True):
        outcomes = [result] * len(indexes) if isinstance(result, BaseException) else result
        found.update(zip(indexes, outcomes, strict=True))
    return [found[index] for index in range(len(found))]
