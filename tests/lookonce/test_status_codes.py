"""The status table is complete and unambiguous, and a status without our details still becomes a typed error."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from lookonce import errors, status_codes

# The base of all errors is never raised, and start-up errors never leave their process.
WITHOUT_ROW = {
    errors.LookonceError,
    errors.StartupError,
    errors.ConfigurationError,
    errors.ModelFolderError,
}


class FailedCall(grpc.RpcError):
    """A call that gRPC itself or a proxy ended, with or without status details."""

    def __init__(self, code: grpc.StatusCode, details: str, status: status_pb2.Status | None = None) -> None:
        super().__init__()
        self._code, self._details, self._status = code, details, status

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        if self._status is None:
            return ()
        return (("grpc-status-details-bin", self._status.SerializeToString()),)


def _all_errors() -> set[type[errors.LookonceError]]:
    return {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.LookonceError)
    }


def _number(code: grpc.StatusCode) -> int:
    value: Any = code.value[0]
    return int(value)


def _packed(message: Any) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


def _status(code: int, domain: str, reason: str, **metadata: str) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(domain=domain, reason=reason, metadata=metadata)
    return status_pb2.Status(code=code, message="text", details=[_packed(info)])


def _status_with_pause(code: int, *details: Any) -> status_pb2.Status:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(2500)
    return status_pb2.Status(code=code, message="text", details=[_packed(detail) for detail in (*details, retry)])


@pytest.mark.parametrize("retry_after_s", [None, 2.5])
def test_an_unavailable_service_may_advise_a_pause(retry_after_s: float | None) -> None:
    status = status_codes.to_status(errors.UnavailableError("busy", retry_after_s=retry_after_s))
    received = status_codes.from_status(status)
    assert isinstance(received, errors.UnavailableError)
    assert (received.message, received.retry_after_s) == ("busy", retry_after_s)


def test_the_table_has_a_row_for_every_error_that_a_client_can_meet() -> None:
    assert {row.exception for row in status_codes.STATUS_TABLE} == _all_errors() - WITHOUT_ROW


def test_reasons_and_exceptions_are_unique() -> None:
    reasons = [row.reason for row in status_codes.STATUS_TABLE]
    assert len(set(reasons)) == len(reasons) == len({row.exception for row in status_codes.STATUS_TABLE})
    assert all(reason.isupper() and reason.replace("_", "").isalpha() for reason in reasons)


def test_a_subclass_without_a_row_takes_that_of_its_base() -> None:
    class NarrowError(errors.ImageTooLargeError):
        pass

    assert status_codes.status_row(NarrowError("x")).reason == "IMAGE_TOO_LARGE"


@pytest.mark.parametrize("kind", [errors.ConfigurationError, errors.ModelFolderError, errors.LookonceError])
def test_an_error_that_clients_must_not_see_is_an_internal_error(kind: type[errors.LookonceError]) -> None:
    assert status_codes.status_row(kind("x")).exception is errors.InternalError
    assert status_codes.code_number(kind("x")) == grpc.StatusCode.INTERNAL.value[0]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, errors.AbortedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidInputError),
        (grpc.StatusCode.OUT_OF_RANGE, errors.InvalidInputError),
        (grpc.StatusCode.UNAUTHENTICATED, errors.UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDeniedError),
        (grpc.StatusCode.NOT_FOUND, errors.InternalError),
        (grpc.StatusCode.DATA_LOSS, errors.InternalError),
    ],
)
def test_a_status_without_details_becomes_the_error_of_its_code(
    code: grpc.StatusCode, kind: type[errors.LookonceError]
) -> None:
    received = status_codes.from_rpc_error(FailedCall(code, "text"))
    assert (type(received), received.message) == (kind, "text")


def test_a_status_without_text_gets_the_name_of_its_code() -> None:
    assert status_codes.from_rpc_error(FailedCall(grpc.StatusCode.UNAVAILABLE, "")).message == "UNAVAILABLE"


def test_details_that_a_proxy_made_contradict_the_code_are_ignored() -> None:
    sent = status_codes.to_status(errors.OverloadedError("full"))
    received = status_codes.from_rpc_error(FailedCall(grpc.StatusCode.UNAVAILABLE, "proxy", sent))
    assert (type(received), received.message) == (errors.UnavailableError, "proxy")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidInputError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnsupportedError),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.InternalError),
    ],
)
@pytest.mark.parametrize(("domain", "reason"), [("other.example", "OVERLOADED"), ("lookonce", "FROM_A_NEWER_SERVER")])
def test_details_that_this_client_does_not_know_become_the_error_of_the_code(
    domain: str, reason: str, code: grpc.StatusCode, kind: type[errors.LookonceError]
) -> None:
    received = status_codes.from_status(_status(_number(code), domain, reason))
    assert (type(received), received.message) == (kind, "text")


def test_the_details_of_others_beside_ours_change_nothing() -> None:
    status = status_codes.to_status(errors.PromptEmptyError("text"))
    for other in (error_details_pb2.ErrorInfo(domain="other.example", reason="OVERLOADED"), error_details_pb2.Help()):
        status.details.append(_packed(other))
    assert type(status_codes.from_status(status)) is errors.PromptEmptyError


def test_a_pause_that_others_advise_is_read() -> None:
    code = _number(grpc.StatusCode.UNAVAILABLE)
    received = status_codes.from_status(_status_with_pause(code))
    assert isinstance(received, errors.UnavailableError)
    assert received.retry_after_s == 2.5
    info = error_details_pb2.ErrorInfo(domain="lookonce", reason="QUOTA_OF_A_NEWER_SERVER")
    overloaded = status_codes.from_status(_status_with_pause(_number(grpc.StatusCode.RESOURCE_EXHAUSTED), info))
    assert isinstance(overloaded, errors.OverloadedError)
    assert overloaded.retry_after_s == 2.5


def test_an_overload_without_advice_has_the_pause_of_the_exception() -> None:
    received = status_codes.from_status(_status(_number(grpc.StatusCode.RESOURCE_EXHAUSTED), "lookonce", "OVERLOADED"))
    assert isinstance(received, errors.OverloadedError)
    assert received.retry_after_s == errors.OverloadedError("").retry_after_s


def test_details_that_cannot_be_read_are_ignored() -> None:
    code = _number(grpc.StatusCode.UNAVAILABLE)
    status = _status(code, "lookonce", "OVERLOADED")
    status.details[0].value = b"\xff\xff\xff"
    assert type(status_codes.from_status(status)) is errors.UnavailableError
    call = FailedCall(grpc.StatusCode.UNAVAILABLE, "text")
    call.trailing_metadata = lambda: (("grpc-status-details-bin", b"\xff\xff\xff"),)  # type: ignore[method-assign]
    received = status_codes.from_rpc_error(call)
    assert (type(received), received.message) == (errors.UnavailableError, "text")


@pytest.mark.parametrize("indexes", ["a,b", "-1,99", "1,", "٣", "9" * 5000])
def test_unusable_positions_of_images_are_unknown_ones(indexes: str) -> None:
    code = _number(grpc.StatusCode.NOT_FOUND)
    received = status_codes.from_status(_status(code, "lookonce", "EMBEDDING_NOT_CACHED", indexes=indexes))
    assert isinstance(received, errors.EmbeddingNotCachedError)
    assert received.indexes == ()


def test_a_code_that_no_version_knows_is_an_internal_error() -> None:
    for details in ([], [_packed(error_details_pb2.ErrorInfo(domain="lookonce", reason="X"))]):
        received = status_codes.from_status(status_pb2.Status(code=99, details=details))
        assert (type(received), received.message) == (errors.InternalError, "unknown status 99")


def test_an_unknown_reason_without_a_code_is_an_internal_error() -> None:
    assert type(status_codes.from_reason("FROM_A_NEWER_SERVER", "text", {})) is errors.InternalError


def test_codes_and_reasons_stay_as_clients_know_them() -> None:
    known = {row.exception: (row.code.name, row.reason) for row in status_codes.STATUS_TABLE}
    assert known == {
        errors.InvalidInputError: ("INVALID_ARGUMENT", "INVALID_INPUT"),
        errors.InvalidParameterError: ("INVALID_ARGUMENT", "INVALID_PARAMETER"),
        errors.PromptEmptyError: ("INVALID_ARGUMENT", "PROMPT_EMPTY"),
        errors.ContextTooLongError: ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG"),
        errors.ImageCountError: ("INVALID_ARGUMENT", "IMAGE_COUNT"),
        errors.PlaceholderMismatchError: ("INVALID_ARGUMENT", "PLACEHOLDER_MISMATCH"),
        errors.ImageUndecodableError: ("INVALID_ARGUMENT", "IMAGE_UNDECODABLE"),
        errors.ImageTooLargeError: ("INVALID_ARGUMENT", "IMAGE_TOO_LARGE"),
        errors.ImageDecodeLimitError: ("INVALID_ARGUMENT", "IMAGE_DECODE_LIMIT"),
        errors.ImagePoisonousError: ("INVALID_ARGUMENT", "IMAGE_POISONOUS"),
        errors.DigestMismatchError: ("INVALID_ARGUMENT", "DIGEST_MISMATCH"),
        errors.EmbeddingNotCachedError: ("NOT_FOUND", "EMBEDDING_NOT_CACHED"),
        errors.FingerprintMismatchError: ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH"),
        errors.UnsupportedError: ("UNIMPLEMENTED", "UNSUPPORTED"),
        errors.OverloadedError: ("RESOURCE_EXHAUSTED", "OVERLOADED"),
        errors.MessageTooLargeError: ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE"),
        errors.UnavailableError: ("UNAVAILABLE", "UNAVAILABLE"),
        errors.CacheAccessError: ("FAILED_PRECONDITION", "CACHE_ACCESS_DENIED"),
        errors.DeadlineError: ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        errors.AbortedError: ("CANCELLED", "ABORTED"),
        errors.UnauthenticatedError: ("UNAUTHENTICATED", "UNAUTHENTICATED"),
        errors.PermissionDeniedError: ("PERMISSION_DENIED", "PERMISSION_DENIED"),
        errors.InternalError: ("INTERNAL", "INTERNAL"),
    }
    assert all((kind.code, kind.reason) == pair for kind, pair in known.items())


def test_an_error_of_a_newer_server_keeps_its_code_and_reason() -> None:
    error = status_codes.from_reason("TOO_PURPLE", "it is too purple", {}, code=grpc.StatusCode.DATA_LOSS.value[0])
    assert (type(error), error.code, error.reason) == (errors.InternalError, "DATA_LOSS", "TOO_PURPLE")
