"""Converts images to the requests of both clients to an encoder, and chooses those to upload. Calls no server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace

from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb2
from lookonce.errors import EmbeddingNotCachedError, InternalError
from lookonce.images import EmbeddingSource, Encoding, ImageRef
from lookonce.sdk.answers import seconds_of
from lookonce.sdk.messages import assign_max_pixels, image_source, key_of

MAX_LOOKUP_KEYS = 256
_SOURCES: Mapping[int, EmbeddingSource] = {
    encoder_pb2.RESULT_SOURCE_COMPUTED: "computed",
    encoder_pb2.RESULT_SOURCE_COALESCED: "coalesced",
    encoder_pb2.RESULT_SOURCE_LOCAL_CACHE: "local cache",
    encoder_pb2.RESULT_SOURCE_SHARED_CACHE: "shared cache",
}


class EncodePlan:
    """One `encode` call: looks up all images and uploads each missing one once, in requests within the limits."""

    def __init__(self, images: Sequence[ImageRef]) -> None:
        self._images = list(images)
        # The same image may be given by digest and with its bytes; the one with bytes wins.
        self._distinct = {image: image for image in sorted(self._images, key=lambda image: image.data is not None)}
        self._known: dict[ImageRef, Encoding] = {}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to upload."""
        return len(self._known) == len(self._distinct)

    def lookups(self) -> Iterator[tuple[list[ImageRef], encoder_pb2.LookupEmbeddingsRequest]]:
        """Returns look-ups of all images, which also renew the entries that they find."""
        return lookup_requests(self._distinct, touch=True)

    def take_lookup(self, images: Sequence[ImageRef], response: encoder_pb2.LookupEmbeddingsResponse) -> None:
        """Takes the answer to a look-up of `images`. Raises InternalError for a wrong number of results."""
        _check_number(images, response.results)
        for image, result in zip(images, response.results, strict=True):
            if result.cached:
                size = result.embedding
                self._known[image] = Encoding(size.num_rows, size.size_bytes, "cache", 0.0, stored=True)

    def uploads(
        self, info: encoder_pb2.GetEncoderInfoResponse
    ) -> Iterator[tuple[list[ImageRef], encoder_pb2.EncodeRequest]]:
        """Yields Encode requests for the missing images. Raises EmbeddingNotCachedError if one has no bytes."""
        missing = [image for key, image in self._distinct.items() if key not in self._known]
        without_bytes = {image for image in missing if image.data is None}
        if without_bytes:
            indexes = [index for index, image in enumerate(self._images) if image in without_bytes]
            raise EmbeddingNotCachedError(f"{len(indexes)} images are not cached; give their bytes", indexes=indexes)
        # A tenth of a message is left for everything but image bytes.
        for batch in _batches(missing, max(1, info.max_batch_items), info.max_message_bytes * 9 // 10):
            items = [
                encoder_pb2.EncodeItem(image=image_source(image, as_bytes=True, in_prompt=False)) for image in batch
            ]
            yield batch, encoder_pb2.EncodeRequest(items=items)

    def take_encoded(self, images: Sequence[ImageRef], response: encoder_pb2.EncodeResponse) -> None:
        """Takes the answer to an Encode request for `images`. Raises InternalError for a wrong number of results."""
        _check_number(images, response.results)
        for image, result in zip(images, response.results, strict=True):
            self._known[image] = Encoding(
                num_rows=result.embedding.num_rows,
                size_bytes=result.embedding.size_bytes,
                source=_SOURCES.get(result.source, "computed"),
                compute_time_s=seconds_of(result.compute_time),
                stored=result.stored,
            )

    def images(self) -> list[ImageRef]:
        """Returns the images in the given order, each with its encoding."""
        return [replace(image, encoding=self._known[image]) for image in self._images]


def lookup_requests(
    images: Iterable[ImageRef], *, touch: bool
) -> Iterator[tuple[list[ImageRef], encoder_pb2.LookupEmbeddingsRequest]]:
    """Yields look-ups of at most 256 distinct images, all with the same options, each with its images."""
    by_options: dict[tuple[int | None, bool], list[ImageRef]] = {}
    for image in dict.fromkeys(images):
        by_options.setdefault((image.max_pixels, image.beside_others), []).append(image)
    for (max_pixels, beside_others), group in by_options.items():
        for start in range(0, len(group), MAX_LOOKUP_KEYS):
            chunk = group[start : start + MAX_LOOKUP_KEYS]
            request = encoder_pb2.LookupEmbeddingsRequest(
                keys=[key_of(image) for image in chunk], touch=touch, beside_others=beside_others
            )
            assign_max_pixels(request, max_pixels)
            yield chunk, request


def cached_images(images: Sequence[ImageRef], response: encoder_pb2.LookupEmbeddingsResponse) -> list[ImageRef]:
    """Returns the images that a look-up found in the cache. Raises InternalError for a wrong number of results."""
    _check_number(images, response.results)
    return [image for image, result in zip(images, response.results, strict=True) if result.cached]


def _check_number(images: Sequence[ImageRef], results: Sized) -> None:
    if len(results) != len(images):
        raise InternalError(f"the encoder answered with {len(results)} results for {len(images)} images")


def _batches(images: Sequence[ImageRef], max_items: int, max_bytes: int) -> Iterator[list[ImageRef]]:
    """Yields batches within both limits. An image over the byte limit gets a batch that the server refuses."""
    batch: list[ImageRef] = []
    num_bytes = 0
    for image in images:
        size_bytes = len(image.data or b"")
        if batch and (len(batch) == max_items or num_bytes + size_bytes > max_bytes):
            yield batch
            batch, num_bytes = [], 0
        batch.append(image)
        num_bytes += size_bytes
    if batch:
        yield batch
