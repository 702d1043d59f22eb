"""Log-probabilities of tokens in OpenAI's forms, with the text of each token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from lookonce.generation import TokenLogprobs

TokenTexts: TypeAlias = Callable[[Sequence[int]], Awaitable[list[str]]]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


async def chat_logprobs(tokens: Sequence[TokenLogprobs], num_top: int, texts_of: TokenTexts) -> list[dict[str, Any]]:
    """Returns an entry for each token: its text, its bytes, its log-probability, and those of the likeliest ones.

    The bytes of a token that is a part of a character are not known: they are null.
    """
    texts = iter(await texts_of([token_id for top in tokens for token_id, _ in top]))
    entries = []
    for top in tokens:
        named = [_entry(next(texts), logprob) for _, logprob in top]
        entries.append({**named[0], "top_logprobs": named[1 : num_top + 1]})
    return entries


async def completion_logprobs(
    tokens: Sequence[TokenLogprobs], first_offset: int, texts_of: TokenTexts
) -> dict[str, list[Any]]:
    """Returns the lists of the older form. `first_offset` is the place of the first token's text in the answer."""
    texts = iter(await texts_of([token_id for top in tokens for token_id, _ in top]))
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    offset = first_offset
    for top in tokens:
        named = [(next(texts), logprob) for _, logprob in top]
        result["tokens"].append(named[0][0])
        result["token_logprobs"].append(named[0][1])
        result["top_logprobs"].append(dict(named[1:]))
        result["text_offset"].append(offset)
        offset += len(named[0][0])
    return result


def _entry(text: str, logprob: float) -> dict[str, Any]:
    is_whole = _INCOMPLETE not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}
