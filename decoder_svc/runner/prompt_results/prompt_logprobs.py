"""Log probabilities of the tokens of prompts, from the hidden states that precede them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from decoder_svc.runner.input_batch import InputBatch, IntArray, RequestRow
from decoder_svc.scheduling.scheduler_output import ScheduledChunk

# Rows of logits that exist at the same time. A row takes as many floats as the vocabulary has tokens.
_ROWS = 32


def wants_prompt_logprobs(chunks: Sequence[ScheduledChunk], batch: InputBatch) -> bool:
    """Whether any chunk has tokens of a prompt whose log probabilities are asked for."""
    return any(_is_asked_for(batch[chunk.request_id], chunk) for chunk in chunks)


def note_prompt_logprobs(
    hidden: Tensor, chunks: Sequence[ScheduledChunk], batch: InputBatch, logits_of: Callable[[Tensor], Tensor]
) -> None:
    """Adds what the chunks tell about their prompts to the rows of the batch.

    `hidden` are the last hidden states of the pass, `[num_tokens, hidden_size]`. `logits_of` turns some of them into
    logits, `[num_rows, vocab]`; log probabilities are those of these logits.
    """
    first = 0
    for chunk in chunks:
        row = batch[chunk.request_id]
        if _is_asked_for(row, chunk):
            _note(row, chunk, hidden[first : first + chunk.num_tokens], logits_of)
        first += chunk.num_tokens


def _is_asked_for(row: RequestRow, chunk: ScheduledChunk) -> bool:
    """A request that comes back with a part of its answer has told it already."""
    return row.params.prompt_logprobs is not None and not row.has_answer and chunk.start < row.num_prompt_tokens - 1


def _note(row: RequestRow, chunk: ScheduledChunk, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    number = row.params.prompt_logprobs
    assert number is not None, "nobody asks"
    stop = min(chunk.start + chunk.num_tokens, row.num_prompt_tokens - 1)
    # The tokens that these hidden states predict, without those of images.
    predicted = _texts(row, chunk.start + 1, stop + 1)
    for begin in range(0, len(predicted), _ROWS):
        places = predicted[begin : begin + _ROWS]
        of_rows = hidden[torch.from_numpy(places - 1 - chunk.start).to(hidden.device)]
        logprobs = logits_of(of_rows).float().log_softmax(dim=-1)
        ids = torch.from_numpy(row.token_ids[places]).to(hidden.device)[:, None]
        likeliest = logprobs.topk(min(number, logprobs.shape[-1]))
        # float64 holds every id and every float32 exactly.
        values = torch.cat([logprobs.gather(1, ids), likeliest.values], dim=1).double()
        both = torch.stack([torch.cat([ids, likeliest.indices], dim=1).double(), values], dim=-1).tolist()
        row.prompt_logprobs.update(
            (int(place), tuple((int(token_id), value) for token_id, value in entries))
            for place, entries in zip(places, both, strict=True)
        )


def _texts(row: RequestRow, start: int, stop: int) -> IntArray:
    """Returns the places of the tokens [start, stop) that stand for no image."""
    is_text = np.ones(stop - start, dtype=bool)
    for item in row.images:
        is_text[max(0, item.span.offset - start) : max(0, item.span.stop - start)] = False
    places: IntArray = np.flatnonzero(is_text) + start
    return places
