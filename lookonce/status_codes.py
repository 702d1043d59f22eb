"""The one table between exceptions and gRPC statuses with an ErrorInfo reason. Servers and clients both use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from lookonce import errors
from lookonce.identity import REQUEST_ID_KEY

ERROR_DOMAIN = "lookonce"

DetailT = TypeVar("DetailT", bound=Message)


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One line of the table."""

    exception: type[errors.LookonceError]
    code: grpc.StatusCode
    # Machine-readable, UPPER_SNAKE_CASE and unique, so that a client can tell all exceptions apart.
    reason: str


STATUS_TABLE: tuple[StatusRow, ...] = tuple(
    StatusRow(kind, grpc.StatusCode[kind.code], kind.reason)
    for kind in (
        errors.InvalidInputError,
        errors.InvalidParameterError,
        errors.PromptEmptyError,
        errors.ContextTooLongError,
        errors.ImageCountError,
        errors.PlaceholderMismatchError,
        errors.ImageUndecodableError,
        errors.ImageTooLargeError,
        errors.ImageDecodeLimitError,
        errors.ImagePoisonousError,
        errors.DigestMismatchError,
        errors.EmbeddingNotCachedError,
        errors.FingerprintMismatchError,
        errors.UnsupportedError,
        errors.OverloadedError,
        errors.MessageTooLargeError,
        errors.UnavailableError,
        errors.CacheAccessError,
        errors.DeadlineError,
        errors.AbortedError,
        errors.UnauthenticatedError,
        errors.PermissionDeniedError,
        errors.InternalError,
    )
)

_BY_EXCEPTION = {row.exception: row for row in STATUS_TABLE}
_BY_REASON = {row.reason: row for row in STATUS_TABLE}
# The meaning of a status without an ErrorInfo that this version knows: from gRPC itself, a proxy or a newer server.
# A code that is not here has no meaning on which a caller could act.
_BY_CODE: dict[int, type[errors.LookonceError]] = {
    code.value[0]: kind
    for code, kind in (
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidInputError),
        (grpc.StatusCode.OUT_OF_RANGE, errors.InvalidInputError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, errors.AbortedError),
        (grpc.StatusCode.UNAUTHENTICATED, errors.UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDeniedError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnsupportedError),
    )
}
_CODE_NAMES: dict[int | None, str] = {code.value[0]: code.name for code in grpc.StatusCode}
# The texts with which gRPC's libraries (C and Go, Java) refuse a message for its size.
_SIZE_TEXTS = ("larger than max", "exceeds maximum size")
# Positions of images are short; a longer text is none.
_MAX_INDEX_DIGITS = 9


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
    if (retry_after_s := pause_of(error)) is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(retry_after_s * 1000))
        details.append(_packed(retry))
    return status_pb2.Status(code=row.code.value[0], message=error.message, details=details)


def code_number(error: errors.LookonceError) -> int:
    """Returns the google.rpc.Code of an error, for the per-item errors of EncodeStream."""
    return int(status_row(error).code.value[0])


def pause_of(error: errors.LookonceError) -> float | None:
    """Returns the pause before the next try that an error advises, in seconds; None if it advises none."""
    return error.retry_after_s if isinstance(error, errors.OverloadedError | errors.UnavailableError) else None


def from_rpc_error(rpc_error: grpc.RpcError) -> errors.LookonceError:
    """Returns the typed error of a failed call, with the call's id. Never raises.

    Callers act on the code of a status whose details are missing, unknown, or cannot be read.
    """
    error = _without_id(rpc_error)
    # The types of grpc's stubs have no iteration.
    pairs: Iterable[tuple[str, str]] = rpc_error.trailing_metadata() or ()  # type: ignore[assignment]
    error.request_id = dict(pairs).get(REQUEST_ID_KEY)
    return error


def _without_id(rpc_error: grpc.RpcError) -> errors.LookonceError:
    try:
        status = rpc_status.from_call(rpc_error)
    except (ValueError, DecodeError):
        # A proxy changed the code or the text, so details and status disagree, or it damaged the details.
        status = None
    if status is not None:
        return from_status(status)
    return _from_grpc(rpc_error.code(), rpc_error.details() or "")


def from_status(status: status_pb2.Status) -> errors.LookonceError:
    """Returns the error that `to_status` encoded; for a reason that is not in the table, the error of the code."""
    pauses = [_seconds(retry.retry_delay) for retry in _details(status, error_details_pb2.RetryInfo)]
    retry_after_s = pauses[0] if pauses else None
    for info in _details(status, error_details_pb2.ErrorInfo):
        if info.domain == ERROR_DOMAIN:
            return from_reason(info.reason, status.message, dict(info.metadata), retry_after_s, code=status.code)
    return _by_code(status.code, status.message, retry_after_s)


def from_reason(
    reason: str, message: str, metadata: dict[str, str], retry_after_s: float | None = None, *, code: int | None = None
) -> errors.LookonceError:
    """Rebuilds an error from the reason, message and metadata of an ErrorInfo or ItemError.

    `code` is its google.rpc.Code, which decides for a reason that is not in the table.
    """
    row = _BY_REASON.get(reason)
    if row is None:
        error = _by_code(code, message, retry_after_s)
        error.reason = reason
        return error
    kind = row.exception
    if kind is errors.EmbeddingNotCachedError:
        return errors.EmbeddingNotCachedError(message, indexes=_indexes(metadata.get("indexes", "")))
    if kind is errors.InvalidParameterError:
        field = metadata.get("field", message.partition(": ")[0])
        return errors.InvalidParameterError(field, message.removeprefix(f"{field}: "))
    return _with_pause(kind, message, metadata, retry_after_s)


def _from_grpc(code: grpc.StatusCode, text: str) -> errors.LookonceError:
    """Returns the error of a status without details, which gRPC's library or a proxy made."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(part in text for part in _SIZE_TEXTS):
        return errors.MessageTooLargeError(f"{text}; send fewer or smaller images in one message")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        reason = "it may be older than this client, or another service"
        return errors.UnsupportedError(f"the server does not know this call ({text or code.name}); {reason}")
    return _by_code(code.value[0], text, None)


def _by_code(code: int | None, message: str, retry_after_s: float | None) -> errors.LookonceError:
    """Returns the error of a google.rpc.Code; None is an unknown one."""
    kind = errors.InternalError if code is None else _BY_CODE.get(code, errors.InternalError)
    name = _CODE_NAMES.get(code, f"unknown status {code}")
    error = _with_pause(kind, message or name, {}, retry_after_s)
    error.code = name
    error.text_is_foreign = True
    return error


def _with_pause(
    kind: type[errors.LookonceError], message: str, metadata: dict[str, str], retry_after_s: float | None
) -> errors.LookonceError:
    if kind is errors.OverloadedError:
        # Without an advice, the default of the exception.
        advice = {} if retry_after_s is None else {"retry_after_s": retry_after_s}
        return errors.OverloadedError(message, **advice)
    if kind is errors.UnavailableError:
        return errors.UnavailableError(message, metadata=metadata, retry_after_s=retry_after_s)
    return kind(message, metadata=metadata)


def _indexes(text: str) -> list[int]:
    """Returns the positions in a comma-separated list; none, for unknown ones, if one is unusable."""
    parts = text.split(",")
    is_usable = all(part.isascii() and part.isdecimal() and len(part) <= _MAX_INDEX_DIGITS for part in parts)
    return [int(part) for part in parts] if is_usable else []


def _details(status: status_pb2.Status, kind: type[DetailT]) -> Iterator[DetailT]:
    """Yields the details of one type; leaves out those that cannot be read."""
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            detail = kind()
            with contextlib.suppress(DecodeError):
                packed.Unpack(detail)
                yield detail


def _seconds(pause: Duration) -> float:
    return max(0.0, pause.ToMilliseconds() / 1000)


def _error_info(error: errors.LookonceError, row: StatusRow) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=row.reason, domain=ERROR_DOMAIN, metadata=error.metadata)


def _packed(message: error_details_pb2.ErrorInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
