"""Errors as HTTP statuses and OpenAI's JSON: the reason of Lookonce is the `code`, the wrong field the `param`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from lookonce.errors import LookonceError

# HTTP status and OpenAI's type of error, by gRPC code.
_STATUSES: Mapping[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "UNIMPLEMENTED": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "request_cancelled"),
    "UNAVAILABLE": (503, "service_unavailable"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
_FAULT = (500, "server_error")
# Anthropic's types of errors, by status, where they differ from OpenAI's.
_ANTHROPIC_TYPES: Mapping[int, str] = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
# A message may quote a value of the request, which may have any length.
_MAX_MESSAGE = 1000
# Reasons with a status of their own.
_BY_REASON: Mapping[str, tuple[int, str]] = {"MESSAGE_TOO_LARGE": (413, "invalid_request_error")}


class UnknownModelError(LookonceError):
    """The request names a model that is not served."""

    code, reason = "NOT_FOUND", "model_not_found"


class RequestTooLargeError(LookonceError):
    """The body of a request exceeds the limit."""

    code, reason = "RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE"


# Texts in place of those of gRPC and of other programs, which may show addresses.
_PLAIN_TEXTS: Mapping[str, str] = {
    "UNAVAILABLE": "no decoder could answer; try again later",
    "DEADLINE_EXCEEDED": "the answer was not complete in time",
    "RESOURCE_EXHAUSTED": "the decoder takes no more at the moment; try again later",
}
_OTHER_TEXT = "the decoder answered with an error that is not for callers"
# Fields of the contract of decoders, as errors name them.
_CONTRACT_FIELD = re.compile(r"(?:sampling|chat|text|tokens|token_ids|continuations|images|prompt)\b[\w.\[\]]*")
_IMAGE = re.compile(r"images\[\d+\]")
_COMPONENT = re.compile(r"\.\w+")


def status_of(error: LookonceError) -> int:
    """Returns the HTTP status of an error."""
    return _entry(error)[0]


def body_of(error: LookonceError) -> dict[str, Any]:
    """Returns the JSON that tells a client of an error, in OpenAI's form."""
    field = error.metadata.get("field")
    if field is not None:
        field = field.encode(errors="replace").decode()
    # Both may quote a text of the request that has half of a surrogate pair.
    text = error.message.encode(errors="replace").decode()
    message = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} …"
    described = {"message": message, "type": _entry(error)[1], "param": field, "code": error.reason}
    return {"error": described}


def anthropic_body_of(error: LookonceError) -> dict[str, Any]:
    """Returns the JSON that tells a client of an error, in Anthropic's form."""
    status, kind = _entry(error)
    described = body_of(error)["error"]
    kind = _ANTHROPIC_TYPES.get(status, kind)
    return {"type": "error", "error": {"type": kind, "message": f"{described['message']} ({error.reason})"}}


def headers_of(error: LookonceError) -> dict[str, str]:
    """Returns the headers of an error: when to come again, and how to authenticate."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.code == "UNAUTHENTICATED":
        headers["www-authenticate"] = "Bearer"
    return headers


def presentable(error: LookonceError) -> LookonceError:
    """Returns an error whose text is ours."""
    if not error.text_is_foreign:
        return error
    plain = LookonceError(_PLAIN_TEXTS.get(error.code, _OTHER_TEXT))
    plain.code, plain.reason, plain.retry_after_s = error.code, error.reason, error.retry_after_s
    return plain


def renamed(error: LookonceError, names: Mapping[str, str]) -> LookonceError:
    """Returns an error of the decoder with the name that the caller's request has for the field.

    `names` has the caller's name by that of the decoder, without `sampling.`: of fields (`max_tokens`), of places in
    them (`chat.messages[3]`), and of what may follow those (`.arguments`).
    """
    shown = error.metadata.get("field") or error.message.partition(": ")[0]
    # The SDK shows the names of its arguments.
    field = error.contract_field or shown
    if error.contract_field:
        shown = error.message.partition(": ")[0]
    if not _CONTRACT_FIELD.fullmatch(field):
        return error
    own = _own_name(field.removeprefix("sampling."), names)
    changed = LookonceError(f"{own}: {error.message.removeprefix(f'{shown}: ')}", metadata={"field": own})
    changed.code, changed.reason, changed.retry_after_s = error.code, error.reason, error.retry_after_s
    return changed


def _own_name(field: str, names: Mapping[str, str]) -> str:
    """Returns the caller's name of a field: that of the longest known beginning, and of what follows it."""
    for end in range(len(field), 0, -1):
        if field[end : end + 1] in ("", ".", "[") and field[:end] in names:
            # Requests say nothing else of an image than its place.
            rest = "" if _IMAGE.fullmatch(field[:end]) else field[end:]
            return names[field[:end]] + _COMPONENT.sub(lambda found: names.get(found[0], found[0]), rest)
    return field


def _entry(error: LookonceError) -> tuple[int, str]:
    return _BY_REASON.get(error.reason) or _STATUSES.get(error.code, _FAULT)
