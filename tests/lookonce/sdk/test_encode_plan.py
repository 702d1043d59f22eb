"""Look-ups and uploads of images within limits, without any server."""

from __future__ import annotations

import pytest

from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb2
from lookonce.errors import EmbeddingNotCachedError, InternalError
from lookonce.images import ImageRef
from lookonce.sdk.encode_plan import MAX_LOOKUP_KEYS, EncodePlan, cached_images, lookup_requests
from lookonce.sdk.messages import SMALL_IMAGE_BYTES

LARGE = [ImageRef.from_bytes(bytes([number]) * (SMALL_IMAGE_BYTES + 1)) for number in range(4)]
SMALL = ImageRef.from_bytes(b"small")


def _cached(images: list[ImageRef], *, known: set[ImageRef]) -> encoder_pb2.LookupEmbeddingsResponse:
    response = encoder_pb2.LookupEmbeddingsResponse()
    for image in images:
        response.results.add(cached=image in known)
    return response


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wrong_number_of_results_is_the_servers_error(number: int) -> None:
    """It was a ValueError of `zip`."""
    images = LARGE[:2]
    looked_up = encoder_pb2.LookupEmbeddingsResponse(results=[encoder_pb2.LookupResult()] * number)
    encoded = encoder_pb2.EncodeResponse(results=[encoder_pb2.EncodeResult()] * number)
    plan = EncodePlan(images)
    for take in (
        lambda: plan.take_lookup(images, looked_up),
        lambda: plan.take_encoded(images, encoded),
        lambda: cached_images(images, looked_up),
    ):
        with pytest.raises(InternalError, match=f"{number} results for 2 images"):
            take()


def test_an_encode_uploads_each_missing_image_once_within_both_limits() -> None:
    # The first image is given twice, once by its digest alone.
    plan = EncodePlan([ImageRef.from_digest(LARGE[0].digest), *LARGE, LARGE[0], SMALL])
    for images, _ in plan.lookups():
        plan.take_lookup(images, _cached(images, known={LARGE[1]}))
    assert not plan.is_complete
    limits = encoder_pb2.GetEncoderInfoResponse(max_batch_items=2, max_message_bytes=5 * SMALL_IMAGE_BYTES)
    batches = [images for images, _ in plan.uploads(limits)]
    assert sorted(map(len, batches)) == [2, 2]
    assert {image for batch in batches for image in batch} == {LARGE[0], LARGE[2], LARGE[3], SMALL}
    assert all(image.data is not None for batch in batches for image in batch)
    small = encoder_pb2.GetEncoderInfoResponse(max_batch_items=9, max_message_bytes=SMALL_IMAGE_BYTES)
    assert all(len(images) == 1 or SMALL in images for images, _ in plan.uploads(small))


def test_an_encode_of_missing_images_without_bytes_names_all_their_positions() -> None:
    unknown = ImageRef.from_digest(bytes(32))
    plan = EncodePlan([unknown, SMALL, unknown])
    for images, _ in plan.lookups():
        plan.take_lookup(images, _cached(images, known=set()))
    with pytest.raises(EmbeddingNotCachedError) as caught:
        list(plan.uploads(encoder_pb2.GetEncoderInfoResponse(max_batch_items=2, max_message_bytes=1 << 20)))
    assert caught.value.indexes == (0, 2)


def test_look_ups_hold_distinct_images_with_equal_options() -> None:
    refs = [ImageRef.from_digest(number.to_bytes(32, "big")) for number in range(MAX_LOOKUP_KEYS + 1)]
    other = ImageRef.from_digest(bytes(32), max_pixels=100)
    requests = list(lookup_requests([*refs, *refs, other], touch=False))
    assert [len(images) for images, _ in requests] == [MAX_LOOKUP_KEYS, 1, 1]
    assert [request.max_pixels for _, request in requests] == [0, 0, 100]
    assert [len(request.keys) for _, request in requests] == [MAX_LOOKUP_KEYS, 1, 1]
