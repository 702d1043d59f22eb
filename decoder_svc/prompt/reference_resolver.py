"""Resolves the images that a prompt names by their digests: asks the shared cache, then the encoder, for many at once.

A prompt may name hundreds of digests in a few kilobytes, and 400 such prompts may come together. Asking for each digest
alone, in a thread and in a call of its own, stopped the event loop for seconds. So the shared cache is asked for 16
digests in one piece of work, which also derives their keys, and the encoder once for all of a prompt that the cache
does not know. 400 prompts of 128 unknown digests on 8 connections took the decoder 30 s of processor time before they
all reached their deadlines. Now all are answered for 4 s of it (2 × AMD EPYC, 2026-11-25).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from decoder_svc.prompt.preparation_threads import PreparationThreads
from decoder_svc.prompt.prompt_builder import ResolvedImage
from decoder_svc.prompt.prompt_spec import CachedImage
from decoder_svc.rows.encoder_client import MAX_LOOKUP_KEYS, EncoderClient
from lookonce.content_key import ContentKey, EncoderFingerprint, ImageDigest, ProcessorOptions, Tenant, content_key
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.errors import FingerprintMismatchError
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.item_turns import ItemTurns, Place

KEYS_PER_PIECE = 16
"""Digests that are looked up in the shared cache in one turn. The encoder takes as many in a turn."""

# Look-ups at the encoder at a time.
_NUM_ENCODER_LOOKUPS = 16

Reference: TypeAlias = tuple[ImageDigest, ProcessorOptions]
"""What distinguishes the images of one prompt that are named by their digests."""

LookedUp: TypeAlias = tuple[ContentKey, EmbeddingMeta | None]
"""The key of a reference, and the shape of its rows; None for an unknown image."""

Outcome: TypeAlias = ResolvedImage | BaseException | None
"""The result of one reference, or the reason why there is none; None for an unknown image."""

ItemT = TypeVar("ItemT")


class MetadataSource(Protocol):
    """The part of the shared cache that image resolution uses."""

    def metadata_of(self, keys: Sequence[ContentKey]) -> list[EmbeddingMeta | None]:
        """Returns the shapes of images' rows; None for an unknown image. Blocks; never raises."""
        ...


class ReferenceResolver:
    """Looks up digests. Use it on the event loop."""

    def __init__(
        self, encoder: EncoderClient | None, metadata: MetadataSource | None, threads: PreparationThreads
    ) -> None:
        self._encoder = encoder
        self._metadata = metadata
        self._threads = threads
        # Look-ups at the encoder have turns of their own: it may be slow, and hits in the shared cache need not wait.
        self._encoder_turns = ItemTurns(_NUM_ENCODER_LOOKUPS)

    @staticmethod
    def cost(num_sources: int) -> int:
        """Returns the cost of a place for `resolve`, which takes it once for each piece."""
        return min(num_sources, KEYS_PER_PIECE)

    async def resolve(
        self,
        sources: Sequence[CachedImage],
        fingerprint: EncoderFingerprint,
        tenant: Tenant,
        caller: CallerId,
        place: Place,
    ) -> list[Outcome]:
        """Returns the outcome of each source, in order. A digest that occurs several times is looked up once."""
        served = [source for source in sources if source.fingerprint in (None, fingerprint)]
        references = list(dict.fromkeys((source.digest, source.options) for source in served))
        looked_up: dict[Reference, LookedUp] = {}
        for piece in _pieces(references, KEYS_PER_PIECE):
            await place.take()
            looked_up |= await self._look_up(piece, fingerprint, tenant, caller)
            place.give_back()
        found: dict[Reference, LookedUp | BaseException] = {**looked_up}
        unknown = {one: key for one, (key, meta) in looked_up.items() if meta is None}
        if unknown and self._encoder is not None:
            found |= await self._ask_encoder(self._encoder, unknown, caller)
        return [_outcome(source, fingerprint, found) for source in sources]

    async def _look_up(
        self, references: Sequence[Reference], fingerprint: EncoderFingerprint, tenant: Tenant, caller: CallerId
    ) -> dict[Reference, LookedUp]:
        """Derives the keys of references, and asks the shared cache for their metadata if there is one."""
        if self._metadata is None:
            return {one: (_key(one, fingerprint, tenant), None) for one in references}
        return await self._threads.look_up(
            caller, len(references), _read_metadata, self._metadata, references, fingerprint, tenant
        )

    async def _ask_encoder(
        self, encoder: EncoderClient, unknown: Mapping[Reference, ContentKey], caller: CallerId
    ) -> dict[Reference, LookedUp | BaseException]:
        """Asks the encoder by one call for all references with the same options, at most MAX_LOOKUP_KEYS of them."""
        calls = list(_calls(unknown))
        items = [functools.partial(_ask, encoder, unknown, references) for references in calls]
        if len(items) == 1:
            results = [await self._encoder_turns.run_one(caller, items[0], len(unknown))]
        else:
            results = await self._encoder_turns.run_all(caller, items, map(len, calls))
        found: dict[Reference, LookedUp | BaseException] = {}
        for references, result in zip(calls, results, strict=True):
            found |= dict.fromkeys(references, result) if isinstance(result, BaseException) else result
        results.clear()
        return found


def _read_metadata(
    source: MetadataSource, references: Sequence[Reference], fingerprint: EncoderFingerprint, tenant: Tenant
) -> dict[Reference, LookedUp]:
    keys = [_key(one, fingerprint, tenant) for one in references]
    return dict(zip(references, zip(keys, source.metadata_of(keys), strict=True), strict=True))


def _key(reference: Reference, fingerprint: EncoderFingerprint, tenant: Tenant) -> ContentKey:
    digest, options = reference
    return content_key(digest, fingerprint, options, tenant)


def _calls(references: Iterable[Reference]) -> Iterator[Sequence[Reference]]:
    """Yields the references that one call of the encoder can look up together."""
    by_options: dict[ProcessorOptions, list[Reference]] = {}
    for reference in references:
        by_options.setdefault(reference[1], []).append(reference)
    for group in by_options.values():
        yield from _pieces(group, MAX_LOOKUP_KEYS)


async def _ask(
    encoder: EncoderClient, unknown: Mapping[Reference, ContentKey], references: Sequence[Reference], place: Place
) -> dict[Reference, LookedUp]:
    """Looks up references with equal options at the encoder."""
    keys = [unknown[one] for one in references]
    metas = await encoder.lookup(keys, references[0][1])
    return dict(zip(references, zip(keys, metas, strict=True), strict=True))


def _outcome(
    source: CachedImage, fingerprint: EncoderFingerprint, found: Mapping[Reference, LookedUp | BaseException]
) -> Outcome:
    if source.fingerprint not in (None, fingerprint):
        return FingerprintMismatchError(
            "the key names another encoder fingerprint than the one served here; leave it empty or ask GetModelInfo"
        )
    looked_up = found[source.digest, source.options]
    if isinstance(looked_up, BaseException):
        return looked_up
    key, meta = looked_up
    if meta is None:
        return None
    return ResolvedImage(key, meta.image_width, meta.image_height, source.options, None, meta.num_rows)


def _pieces(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    """Yields the items in order, at most `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
