"""Messages and errors of the encoder's calls as the decoder's own types. Makes no call.

No text of gRPC and no address is in the errors.
"""

from __future__ import annotations

from typing import TypedDict

import grpc
import grpc.aio

from lookonce import errors, status_codes
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.errors import InvalidParameterError, LookonceError, UnavailableError

SENDER = "the encoder service"
"""The encoder in the texts of errors."""

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_DTYPES = {
    common_pb2.DATA_TYPE_FLOAT32: RowDtype.FLOAT32,
    common_pb2.DATA_TYPE_FLOAT16: RowDtype.FLOAT16,
    common_pb2.DATA_TYPE_BFLOAT16: RowDtype.BFLOAT16,
    common_pb2.DATA_TYPE_INT8_SCALED: RowDtype.INT8_SCALED,
}


class WireOptions(TypedDict):
    """Protobuf fields for processor options."""

    max_pixels: int | None
    beside_others: bool
    frame_size: common_pb2.PixelSize | None


def wire_options(options: ProcessorOptions) -> WireOptions:
    """Returns the fields that every call about an image has."""
    frame_size = None
    if options.frame_size is not None:
        width, height = options.frame_size
        frame_size = common_pb2.PixelSize(width=width, height=height)
    return {"max_pixels": options.max_pixels, "beside_others": options.beside_others, "frame_size": frame_size}


def wire_key(key: ContentKey) -> common_pb2.ContentKey:
    """Returns the key as a message."""
    return common_pb2.ContentKey(
        digest=key.digest, algorithm=common_pb2.HASH_ALGORITHM_SHA256, encoder_fingerprint=key.fingerprint
    )


def check_key(info: common_pb2.EmbeddingInfo, expected: ContentKey) -> None:
    """Raises UnavailableError for the rows of another image or another encoder."""
    if info.key.digest != expected.digest or info.key.encoder_fingerprint != expected.fingerprint:
        raise UnavailableError("the encoder service answered for another image; retry")


def embedding_meta(info: common_pb2.EmbeddingInfo) -> EmbeddingMeta:
    """Returns the shape of rows. Raises UnavailableError for an unknown element type."""
    return EmbeddingMeta(
        num_rows=info.num_rows,
        hidden_size=info.hidden_size,
        num_levels=info.num_levels,
        dtype=row_dtype(info.dtype),
        image_width=info.image_width,
        image_height=info.image_height,
    )


def looked_up(result: encoder_service_pb2.LookupResult, expected: ContentKey) -> EmbeddingMeta | None:
    """Returns the shape of rows that were looked up; None if the image is unknown. Raises as `check_key` does."""
    if not result.cached:
        return None
    check_key(result.embedding, expected)
    return embedding_meta(result.embedding)


def row_dtype(value: common_pb2.DataType.ValueType) -> RowDtype:
    """Returns the element type of rows. Raises UnavailableError for an unknown one."""
    dtype = _DTYPES.get(value)
    if dtype is None:
        raise UnavailableError("the encoder service uses an element type that this decoder does not know")
    return dtype


def without_position(error: LookonceError) -> LookonceError:
    """Removes the image's position in the encoder call from an error: it means nothing to the decoder's caller."""
    if isinstance(error, InvalidParameterError):
        return InvalidParameterError(error.field.rpartition(".")[2], error.description)
    error.metadata.pop("index", None)
    return error


def own_error(error: grpc.aio.AioRpcError) -> LookonceError | None:
    """Returns the encoder's own error; None for an error of the connection."""
    typed = status_codes.from_rpc_error(error)
    if isinstance(typed, errors.MessageTooLargeError):
        return errors.ImageTooLargeError("the image is over the encoder service's message limit; send a smaller file")
    is_from_encoder = _STATUS_DETAILS_KEY in error.trailing_metadata()
    is_end_of_call = isinstance(typed, errors.DeadlineError | errors.AbortedError)
    return typed if is_from_encoder and not is_end_of_call else None


def connection_error(error: grpc.aio.AioRpcError, timeout_s: float) -> UnavailableError:
    """Returns the error of a call that no encoder answered."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(f"the encoder service did not answer within {timeout_s:g} s; retry")
    return UnavailableError("the encoder service cannot be reached; retry")
