"""Protobuf messages of the encoder ⇄ plain types. Checks every field that comes from outside; does nothing else."""

from __future__ import annotations

from encoder_svc.cache.encode_job import CachePolicy, EncodeOutcome, ImageInput, Origin
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ContentKey, ImageDigest, ProcessorOptions, parse_digest
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.errors import InvalidParameterError, LookonceError
from lookonce.image_file import FramePair, ImageFile
from lookonce.status_codes import code_number, pause_of, status_row

DATA_TYPES = {
    RowDtype.FLOAT32: common_pb2.DATA_TYPE_FLOAT32,
    RowDtype.FLOAT16: common_pb2.DATA_TYPE_FLOAT16,
    RowDtype.BFLOAT16: common_pb2.DATA_TYPE_BFLOAT16,
    RowDtype.INT8_SCALED: common_pb2.DATA_TYPE_INT8_SCALED,
}

_CACHE_POLICIES: dict[int, CachePolicy] = {
    pb.CACHE_POLICY_UNSPECIFIED: CachePolicy.READ_AND_WRITE,
    pb.CACHE_POLICY_REFRESH: CachePolicy.REFRESH,
    pb.CACHE_POLICY_ONLY_IF_CACHED: CachePolicy.ONLY_IF_CACHED,
}
_SOURCES = {
    Origin.COMPUTED: pb.RESULT_SOURCE_COMPUTED,
    Origin.COALESCED: pb.RESULT_SOURCE_COALESCED,
    Origin.LOCAL_CACHE: pb.RESULT_SOURCE_LOCAL_CACHE,
    Origin.SHARED_CACHE: pb.RESULT_SOURCE_SHARED_CACHE,
}
_SHA256 = (common_pb2.HASH_ALGORITHM_UNSPECIFIED, common_pb2.HASH_ALGORITHM_SHA256)


def parse_cache_policy(policy: int) -> CachePolicy:
    """The policy of an enum number. Raises InvalidParameterError for a number that the contract does not name."""
    if policy not in _CACHE_POLICIES:
        raise InvalidParameterError("cache_policy", f"{policy} is not a cache policy")
    return _CACHE_POLICIES[policy]


def parse_options(
    message: pb.LookupEmbeddingsRequest
    | pb.ReadEmbeddingRequest
    | pb.EmbeddingSelection
    | pb.EvictEmbeddingsRequest
    | common_pb2.ImageSource,
) -> ProcessorOptions:
    """Returns those options of a message that are part of the key under which rows are cached."""
    frame_size = (message.frame_size.width, message.frame_size.height) if message.HasField("frame_size") else None
    return ProcessorOptions(
        message.max_pixels if message.HasField("max_pixels") else None, message.beside_others, frame_size
    )


def parse_key(key: common_pb2.ContentKey, field: str) -> ImageDigest:
    """The digest of a key; its fingerprint is for the caller to check. Raises InvalidParameterError."""
    if key.algorithm not in _SHA256:
        raise InvalidParameterError(f"{field}.algorithm", "this server knows SHA-256 only")
    return parse_digest(key.digest, f"{field}.digest")


def parse_image(image: common_pb2.ImageSource, field: str) -> ImageInput:
    """One image; a key's fingerprint is for the caller to check. Raises InvalidParameterError."""
    options = parse_options(image)
    source = image.WhichOneof("source")
    if image.HasField("second_frame") and (source != "data" or options.frame_size is None):
        raise InvalidParameterError(f"{field}.second_frame", "belongs to `data` with a `frame_size`")
    if source == "key":
        if image.HasField("expected_digest"):
            raise InvalidParameterError(f"{field}.expected_digest", "belongs to `data`; a key names its digest itself")
        return ImageInput(None, parse_key(image.key, f"{field}.key"), options)
    if source == "data":
        expected = None
        if image.HasField("expected_digest"):
            expected = parse_digest(image.expected_digest, f"{field}.expected_digest")
        return ImageInput(_file(image), expected, options)
    raise InvalidParameterError(field, "either `data` or `key` must be set")


def _file(image: common_pb2.ImageSource) -> ImageFile:
    if not image.HasField("frame_size"):
        return image.data
    return FramePair(image.data, image.second_frame if image.HasField("second_frame") else None)


def key_message(key: ContentKey) -> common_pb2.ContentKey:
    """The part of a key that clients may know: digest and fingerprint, without tenant and options."""
    return common_pb2.ContentKey(
        digest=key.digest, algorithm=common_pb2.HASH_ALGORITHM_SHA256, encoder_fingerprint=key.fingerprint
    )


def embedding_info(key: ContentKey, meta: EmbeddingMeta) -> common_pb2.EmbeddingInfo:
    """The shape and key of an embedding as a message."""
    return common_pb2.EmbeddingInfo(
        key=key_message(key),
        num_rows=meta.num_rows,
        hidden_size=meta.hidden_size,
        dtype=DATA_TYPES[meta.dtype],
        size_bytes=meta.size_bytes,
        num_levels=meta.num_levels,
        image_width=meta.image_width,
        image_height=meta.image_height,
    )


def lookup_result(key: ContentKey, meta: EmbeddingMeta | None) -> pb.LookupResult:
    """Returns the answer for one key that was looked up; `meta` None: no cache has its rows."""
    return pb.LookupResult() if meta is None else pb.LookupResult(cached=True, embedding=embedding_info(key, meta))


def encode_result(outcome: EncodeOutcome) -> pb.EncodeResult:
    """The answer for one image."""
    result = pb.EncodeResult(
        embedding=embedding_info(outcome.key, outcome.meta), source=_SOURCES[outcome.origin], stored=outcome.stored
    )
    result.compute_time.FromNanoseconds(round(outcome.compute_s * 1e9))
    return result


def item_error(error: LookonceError) -> pb.ItemError:
    """The error of one item of a stream."""
    item = pb.ItemError(code=code_number(error), reason=status_row(error).reason, message=error.message)
    if (retry_after_s := pause_of(error)) is not None:
        item.retry_delay.FromMilliseconds(int(retry_after_s * 1000))
    return item
