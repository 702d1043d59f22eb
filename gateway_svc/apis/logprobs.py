"""Log-probabilities of tokens in OpenAI's forms, with the text of each token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from lookonce.generation import TokenLogprobs

TokenTexts: TypeAlias = Callable[[Sequence[int]], Awaitable[list[str]]]

# Characters between the texts of two tokens: those of tokens that are parts of characters.
_MAX_SKIPPED = 4
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
    tokens: Sequence[TokenLogprobs], text: str, first_offset: int, texts_of: TokenTexts
) -> dict[str, list[Any]]:
    """Returns the lists of the older form.

    `text` is that of these tokens, which begins at `first_offset` of the answer. A control token has no text there, so
    the next token has the same offset.
    """
    texts = iter(await texts_of([token_id for top in tokens for token_id, _ in top]))
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    place = 0
    for top in tokens:
        named = [(next(texts), logprob) for _, logprob in top]
        result["tokens"].append(named[0][0])
        result["token_logprobs"].append(named[0][1])
        result["top_logprobs"].append(dict(named[1:]))
        found = text.find(named[0][0], place)
        is_near = 0 <= found <= place + _MAX_SKIPPED
        result["text_offset"].append(first_offset + (found if is_near else place))
        place = found + len(named[0][0]) if is_near else place
    return result


def _entry(text: str, logprob: float) -> dict[str, Any]:
    is_whole = _INCOMPLETE not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}
