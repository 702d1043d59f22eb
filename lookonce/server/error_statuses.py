"""Statuses for the exceptions of handlers.

They hold no text of a library. Of a fault of the server they hold an opaque id, which its log explains.
"""

from __future__ import annotations

import uuid

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from lookonce import errors, status_codes
from lookonce.logs import get_logger

# A status travels in HTTP/2 headers, which peers limit to 8 KiB. One character may take 12 bytes there.
_MAX_MESSAGE_CHARS = 400
_MAX_STATUS_BYTES = 3072

_log = get_logger(__name__)


def status_of(error: BaseException) -> status_pb2.Status:
    """Returns the status from the table of errors. For any other error, a fault of ours, it holds an opaque id only.

    A lack of memory ends with the calls that need it, so the caller is asked to come back.
    """
    if isinstance(error, MemoryError):
        _log.error("no memory for a call", exc_info=error)
        error = errors.OverloadedError("the server has no memory left for this call; retry later, or send less at once")
    if not isinstance(error, errors.LookonceError):
        return _opaque_status(error)
    is_fault = status_codes.status_row(error).exception is errors.InternalError
    if is_fault and not isinstance(error, errors.InternalError):
        return _opaque_status(error)
    if is_fault:
        _log.error("internal error in a call", exc_info=error)
    return _shortened(status_codes.to_status(error))


def _shortened(status: status_pb2.Status) -> status_pb2.Status:
    """Cuts a status to a size that fits the headers. ErrorInfo, the first detail, always stays."""
    if len(status.message) > _MAX_MESSAGE_CHARS:
        status.message = status.message[: _MAX_MESSAGE_CHARS - 1] + "…"
    if status.ByteSize() > _MAX_STATUS_BYTES:
        del status.details[1:]
    return status


def _opaque_status(error: BaseException) -> status_pb2.Status:
    """Logs the traceback under a new id, and returns INTERNAL with that id."""
    fault_id = uuid.uuid4().hex
    _log.error("unexpected error in a call", fault_id=fault_id, exc_info=error)
    return status_codes.to_status(errors.InternalError(f"internal error {fault_id}"))


def code_of(status: status_pb2.Status) -> grpc.StatusCode:
    """Returns the code of a status as gRPC names it."""
    code: grpc.StatusCode = rpc_status.to_status(status).code
    return code
