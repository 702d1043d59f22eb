"""Reference attention: loops over every query, head and key in float64, and the rule of visible tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.window import Window


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a prompt of `num_tokens`; those before `write_start` are already in the cache."""

    num_tokens: int
    start: int
    write_start: int
    stop: int
    spans: tuple[Span, ...] = ()
    # Tokens generated after the prompt.
    num_generated: int = 0


@dataclass(frozen=True)
class Contents:
    """Queries of a chunk's tokens, and keys and values of all tokens up to its last one."""

    query: Tensor
    keys: Tensor
    values: Tensor


def sees(
    token: int, other: int, spans: Sequence[Span], window: Window | None, *, is_mutual_beyond_window: bool
) -> bool:
    """Whether `token` sees `other`, written out as the rule defines it."""
    is_mutual = any(span.offset <= token < span.stop and span.offset <= other < span.stop for span in spans)
    is_near = True
    if window is not None:
        is_near = other // window.size >= token // window.size if window.is_chunked else token - other < window.size
    if is_mutual and is_mutual_beyond_window:
        return True
    return (is_mutual or other <= token) and is_near


def expected(chunk: Chunk, contents: Contents, options: LayerOptions, *, is_mutual_beyond_window: bool) -> Tensor:
    """Returns the attention as the papers define it, one query and one head at a time."""
    query, keys, values = contents.query.double(), contents.keys.double(), contents.values.double()
    num_groups = query.shape[1] // keys.shape[1]
    spans = () if options.is_causal else chunk.spans
    result = torch.zeros_like(query)
    for token in range(chunk.start, chunk.stop):
        seen = [
            other
            for other in range(chunk.stop)
            if sees(token, other, spans, options.window, is_mutual_beyond_window=is_mutual_beyond_window)
        ]
        for head in range(query.shape[1]):
            scores = torch.stack([query[token - chunk.start, head] @ keys[other, head // num_groups] for other in seen])
            scores = scores * options.scale
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = (scores - scores.max()).exp() / (scores - scores.max()).exp().sum()
            result[token - chunk.start, head] = torch.einsum("k,kd->d", weights, values[seen, head // num_groups])
    return result
