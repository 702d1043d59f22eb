"""The one table between exceptions and gRPC statuses with an ErrorInfo reason. Servers and clients both use it."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from lookonce import errors

ERROR_DOMAIN = "lookonce"


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One line of the table."""

    exception: type[errors.LookonceError]
    code: grpc.StatusCode
    # Machine-readable, UPPER_SNAKE_CASE and unique, so that a client can tell all exceptions apart.
    reason: str


STATUS_TABLE: tuple[StatusRow, ...] = (
    StatusRow(errors.InvalidInputError, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT"),
    StatusRow(errors.InvalidParameterError, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER"),
    StatusRow(errors.PromptEmptyError, grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_EMPTY"),
    StatusRow(errors.ContextTooLongError, grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_TOO_LONG"),
    StatusRow(errors.ImageCountError, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_COUNT"),
    StatusRow(errors.PlaceholderMismatchError, grpc.StatusCode.INVALID_ARGUMENT, "PLACEHOLDER_MISMATCH"),
    StatusRow(errors.ImageUndecodableError, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_UNDECODABLE"),
    StatusRow(errors.ImageTooLargeError, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_TOO_LARGE"),
    StatusRow(errors.ImageDecodeLimitError, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_DECODE_LIMIT"),
    StatusRow(errors.ImagePoisonousError, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_POISONOUS"),
    StatusRow(errors.DigestMismatchError, grpc.StatusCode.INVALID_ARGUMENT, "DIGEST_MISMATCH"),
    StatusRow(errors.EmbeddingNotCachedError, grpc.StatusCode.NOT_FOUND, "EMBEDDING_NOT_CACHED"),
    StatusRow(errors.FingerprintMismatchError, grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH"),
    StatusRow(errors.UnsupportedError, grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED"),
    StatusRow(errors.OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    StatusRow(errors.MessageTooLargeError, grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
    StatusRow(errors.UnavailableError, grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    StatusRow(errors.CacheAccessError, grpc.StatusCode.FAILED_PRECONDITION, "CACHE_ACCESS_DENIED"),
    StatusRow(errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    StatusRow(errors.AbortedError, grpc.StatusCode.CANCELLED, "ABORTED"),
    StatusRow(errors.UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    StatusRow(errors.PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    StatusRow(errors.InternalError, grpc.StatusCode.INTERNAL, "INTERNAL"),
)

_BY_EXCEPTION = {row.exception: row for row in STATUS_TABLE}
_BY_REASON = {row.reason: row for row in STATUS_TABLE}
# The meaning of a status without our ErrorInfo, which gRPC itself or a proxy sent.
_BY_CODE: dict[grpc.StatusCode, type[errors.LookonceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInputError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.MessageTooLargeError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.AbortedError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedError,
}


def status_row(error: errors.LookonceError) -> StatusRow:
    """Returns the row of an error's class or nearest base class; the row of InternalError for a start-up error."""
    for kind in type(error).__mro__:
        if kind in _BY_EXCEPTION:
            return _BY_EXCEPTION[kind]
    return _BY_EXCEPTION[errors.InternalError]


def to_status(error: errors.LookonceError) -> status_pb2.Status:
    """Returns a google.rpc.Status with ErrorInfo, and with BadRequest or RetryInfo for the errors that have them."""
    row = status_row(error)
    details: list[any_pb2.Any] = [_packed(_error_info(error, row))]
    if isinstance(error, errors.InvalidParameterError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.description)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, errors.OverloadedError | errors.UnavailableError) and error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_packed(retry))
    return status_pb2.Status(code=row.code.value[0], message=error.message, details=details)


def code_number(error: errors.LookonceError) -> int:
    """Returns the google.rpc.Code of an error, for the per-item errors of EncodeStream."""
    return int(status_row(error).code.value[0])


def from_rpc_error(rpc_error: grpc.RpcError) -> errors.LookonceError:
    """Returns the typed error of a failed call. Never raises; an unknown status becomes InternalError."""
    try:
        status = rpc_status.from_call(rpc_error)
    except ValueError:
        # A proxy changed the code or the text, so details and status disagree. Callers act on the code.
        status = None
    if status is not None:
        return from_status(status)
    code = rpc_error.code()
    message = rpc_error.details() or code.name
    return _BY_CODE.get(code, errors.InternalError)(message)


def from_status(status: status_pb2.Status) -> errors.LookonceError:
    """Returns the error that `to_status` encoded."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    has_info = False
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            has_info = detail.Unpack(info) and info.domain == ERROR_DOMAIN
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
    if not has_info or info.reason not in _BY_REASON:
        return errors.InternalError(status.message or code_pb2.Code.Name(status.code))
    return from_reason(info.reason, status.message, dict(info.metadata), retry.retry_delay.ToMilliseconds() / 1000)


def from_reason(
    reason: str, message: str, metadata: dict[str, str], retry_after_s: float = 0.0
) -> errors.LookonceError:
    """Rebuilds an error from the reason, message and metadata of an ErrorInfo or ItemError."""
    kind = _BY_REASON[reason].exception if reason in _BY_REASON else errors.InternalError
    if kind is errors.EmbeddingNotCachedError:
        indexes = [int(index) for index in metadata.get("indexes", "").split(",") if index]
        return errors.EmbeddingNotCachedError(message, indexes=indexes)
    if kind is errors.OverloadedError:
        return errors.OverloadedError(message, retry_after_s=retry_after_s)
    if kind is errors.UnavailableError:
        return errors.UnavailableError(message, metadata=metadata, retry_after_s=retry_after_s or None)
    if kind is errors.InvalidParameterError:
        field = metadata.get("field", "")
        return errors.InvalidParameterError(field, message.removeprefix(f"{field}: "))
    return kind(message, metadata=metadata)


def _error_info(error: errors.LookonceError, row: StatusRow) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=row.reason, domain=ERROR_DOMAIN, metadata=error.metadata)


def _packed(message: error_details_pb2.ErrorInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
