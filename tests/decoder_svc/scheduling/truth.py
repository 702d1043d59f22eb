"""Names the context of a token: all that its result depends on, told from the request alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from decoder_svc.scheduling.request import Request


def truth(request: Request, token_ids: Sequence[int], token: int) -> Hashable:
    """Everything that the keys and values of a token depend on: what is before it, and what it sees behind it.

    `token_ids` are the request's, and what was guessed to follow.
    """
    stop = token + 1
    for span in request.prompt.mutual_spans:
        if span.offset <= token < span.stop:
            stop = span.stop
    return (
        request.cache_scope.salt,
        request.cache_scope.adapter,
        tuple(token_ids[:stop]),
        tuple((item.key.value, item.span.offset) for item in request.prompt.images if item.span.offset < stop),
    )
