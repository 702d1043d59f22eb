"""Converts the arguments and answers of the calls that have no prompt. Calls no server."""

from __future__ import annotations

from collections.abc import Sequence

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import InternalError, InvalidParameterError, UnsupportedError
from lookonce.identity import REQUEST_ID, REQUEST_ID_RULE
from lookonce.sdk.values import fill


def detokenize_request(token_ids: Sequence[int], *, separately: bool = False) -> decoder_pb2.DetokenizeRequest:
    """Returns the request for the text of tokens. Raises InvalidParameterError for anything but their ids."""
    request = decoder_pb2.DetokenizeRequest(separately=separately)
    fill(request, "token_ids", token_ids)
    return request


def token_texts_of(token_ids: Sequence[int], response: decoder_pb2.DetokenizeResponse) -> list[str]:
    """Returns the text of each token.

    Raises UnsupportedError for the answer of an older decoder, and InternalError for a wrong number of texts.
    """
    if response.text and not response.token_texts:
        raise UnsupportedError("the decoder is too old to return the text of single tokens")
    if len(response.token_texts) != len(token_ids):
        raise InternalError(f"the decoder answered with {len(response.token_texts)} texts for {len(token_ids)} tokens")
    return list(response.token_texts)


def abort_request(request_id: str) -> decoder_pb2.AbortRequestRequest:
    """Returns the request to end a running one. Raises InvalidParameterError for what cannot be the id of one."""
    given: object = request_id
    if not isinstance(given, str) or not REQUEST_ID.fullmatch(given):
        raise InvalidParameterError("request_id", f"{REQUEST_ID_RULE}, got {given!r}")
    return decoder_pb2.AbortRequestRequest(request_id=given)
