"""The errors of single items in replies, and of replies that cannot be parsed, for which gRPC has none of its own."""

from __future__ import annotations

from typing import TypeVar

import grpc

from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.errors import LookonceError, UnavailableError
from lookonce.status_codes import from_reason, from_rpc_error

# The text with which a synchronous channel ends a call whose reply it cannot parse. The status is INTERNAL.
_UNPARSABLE = "Exception deserializing response!"

ReplyT = TypeVar("ReplyT")


def parsed(reply: ReplyT | None, sender: str = "the server") -> ReplyT:
    """Returns the reply. Raises UnavailableError for None, which grpc.aio gives for a reply that it cannot parse.

    `sender` is the service that the error names.
    """
    if reply is None:
        raise _broken(sender)
    return reply


def error_of(rpc_error: grpc.RpcError) -> LookonceError:
    """Returns the typed error of a failed synchronous call; UnavailableError if its reply cannot be parsed."""
    if rpc_error.code() is grpc.StatusCode.INTERNAL and rpc_error.details() == _UNPARSABLE:
        return _broken("the server")
    return from_rpc_error(rpc_error)


def error_of_item(item: encoder_service_pb2.ItemError) -> LookonceError:
    """Returns the typed error of one item of EncodeStream."""
    retry_after_s = item.retry_delay.ToMilliseconds() / 1000 if item.HasField("retry_delay") else None
    return from_reason(item.reason, item.message, {}, retry_after_s, code=item.code)


def _broken(sender: str) -> UnavailableError:
    return UnavailableError(f"{sender} sent a reply that cannot be read; retry")
