"""Every value of the contract has one meaning here, and fields that do not go together are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from encoder_svc import wire
from encoder_svc.cache.encode_job import CachePolicy, EncodeOutcome, Origin
from lookonce.common.v1 import common_pb2
from lookonce.content_key import (
    DEFAULT_TENANT,
    EncoderFingerprint,
    ImageDigest,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.errors import (
    ImagePoisonousError,
    InternalError,
    InvalidParameterError,
    LookonceError,
    OverloadedError,
    UnavailableError,
)
from lookonce.image_file import FramePair
from lookonce.sdk.replies import error_of_item

DIGEST = image_digest(b"a picture")
KEY = content_key(DIGEST, EncoderFingerprint("f" * 64), ProcessorOptions(), DEFAULT_TENANT)
META = EmbeddingMeta(16, 32, 2, RowDtype.BFLOAT16, 80, 60)


def image(**fields: Any) -> common_pb2.ImageSource:
    return common_pb2.ImageSource(**fields)


def frame_size(width: int, height: int) -> common_pb2.PixelSize:
    return common_pb2.PixelSize(width=width, height=height)


def test_each_cache_policy_of_the_contract_is_another_one_here() -> None:
    policies = [wire.parse_cache_policy(number) for number in pb.CachePolicy.values()]
    assert sorted(policies, key=lambda policy: policy.value) == sorted(CachePolicy, key=lambda policy: policy.value)
    with pytest.raises(InvalidParameterError, match="99 is not a cache policy"):
        wire.parse_cache_policy(99)


def test_each_origin_and_each_element_type_is_another_number_of_the_contract() -> None:
    sources = {wire.encode_result(EncodeOutcome(KEY, META, origin, 0.0, stored=True)).source for origin in Origin}
    assert sources == set(pb.ResultSource.values()) - {pb.RESULT_SOURCE_UNSPECIFIED}
    assert set(wire.DATA_TYPES) == set(RowDtype)
    assert len(set(wire.DATA_TYPES.values())) == len(RowDtype)


def test_a_result_describes_its_rows_and_names_neither_tenant_nor_options() -> None:
    result = wire.encode_result(EncodeOutcome(KEY, META, Origin.COMPUTED, 1.5, stored=False))
    info = result.embedding
    assert (info.num_rows, info.hidden_size, info.num_levels, info.size_bytes) == (16, 32, 2, META.size_bytes)
    assert (info.image_width, info.image_height) == (80, 60)
    assert (info.key.digest, info.key.encoder_fingerprint) == (DIGEST, "f" * 64)
    assert KEY.value not in result.SerializeToString()
    assert (result.compute_time.ToMilliseconds(), result.stored) == (1500, False)


def test_an_image_is_its_bytes_a_reference_or_a_pair_of_frames() -> None:
    reference = wire.parse_image(image(key=common_pb2.ContentKey(digest=DIGEST)), "image")
    assert (reference.data, reference.digest) == (None, DIGEST)
    plain = wire.parse_image(image(data=b"file", expected_digest=DIGEST, max_pixels=77, beside_others=True), "image")
    assert (plain.data, plain.digest) == (b"file", DIGEST)
    assert plain.options == ProcessorOptions(max_pixels=77, beside_others=True)
    pair = wire.parse_image(image(data=b"1", second_frame=b"2", frame_size=frame_size(56, 28)), "image")
    assert pair.data == FramePair(b"1", b"2")
    assert pair.options.frame_size == (56, 28)
    last = wire.parse_image(image(data=b"1", frame_size=frame_size(56, 28)), "image")
    assert last.data == FramePair(b"1", None)


BAD_IMAGES: dict[str, tuple[common_pb2.ImageSource, str]] = {
    "nothing": (image(), "image"),
    "a reference that expects a digest": (
        image(key=common_pb2.ContentKey(digest=DIGEST), expected_digest=DIGEST),
        "image.expected_digest",
    ),
    "a second frame without a size": (image(data=b"1", second_frame=b"2"), "image.second_frame"),
    "a second frame of a reference": (
        image(key=common_pb2.ContentKey(digest=DIGEST), second_frame=b"2", frame_size=frame_size(56, 28)),
        "image.second_frame",
    ),
    "a short digest": (image(data=b"1", expected_digest=b"short"), "image.expected_digest"),
    "another hash": (
        image(key=common_pb2.ContentKey(digest=DIGEST, algorithm=common_pb2.HASH_ALGORITHM_BLAKE3)),
        "image.key.algorithm",
    ),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_is_refused_by_the_name_of_its_field(kind: str) -> None:
    bad, field = BAD_IMAGES[kind]
    with pytest.raises(InvalidParameterError) as caught:
        wire.parse_image(bad, "image")
    assert caught.value.field == field


def test_sha_256_is_meant_where_no_hash_is_named() -> None:
    for algorithm in (common_pb2.HASH_ALGORITHM_UNSPECIFIED, common_pb2.HASH_ALGORITHM_SHA256):
        found: ImageDigest = wire.parse_key(common_pb2.ContentKey(digest=DIGEST, algorithm=algorithm), "key")
        assert found == DIGEST


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full", retry_after_s=2.5),
        UnavailableError("busy", retry_after_s=0.25),
        UnavailableError("gone"),
        ImagePoisonousError("no"),
        InvalidParameterError("item.image", "either `data` or `key` must be set"),
        InternalError("internal error 0"),
    ],
)
def test_clients_rebuild_the_error_of_an_item_with_its_pause(error: LookonceError) -> None:
    item = wire.item_error(error)
    pause_s = getattr(error, "retry_after_s", None)
    assert item.HasField("retry_delay") == (pause_s is not None)
    received = error_of_item(item)
    assert (type(received), received.message) == (type(error), error.message)
    assert getattr(received, "retry_after_s", None) == pause_s


def test_an_unknown_reason_of_an_item_is_the_error_of_its_code() -> None:
    item = wire.item_error(UnavailableError("text"))
    item.reason = "FROM_A_NEWER_SERVER"
    received = error_of_item(item)
    assert (type(received), received.message) == (UnavailableError, "text")
