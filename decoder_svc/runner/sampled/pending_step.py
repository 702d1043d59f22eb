"""The samples of a step, and the tokens once the device has computed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.runner.input_batch import RequestRow
from decoder_svc.runner.sampling.sampler import PendingSample
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import TokenLogprobs
from decoder_svc.scheduling.scheduler_output import SampledToken


# The class is not frozen: each step makes one object for each request, and a frozen one takes several times as long.
@dataclass(slots=True)
class _PendingTokens:
    """The sampled tokens of one request."""

    request_id: RequestId
    # The batch may have dropped the row before the tokens are known.
    row: RequestRow
    # Index of the token in the request. None for a request with drafts, whose tokens are appended when they are known.
    index: int | None
    # The row's `num_corrections` at the launch: with another number, the token was taken back.
    num_corrections: int
    # The embedding of the prompt, float32 [hidden_size]; None: it is not asked for.
    embedding: Tensor | None = None
    # Log probabilities of the prompt's tokens; empty: they are not asked for.
    prompt: tuple[tuple[tuple[int, float], ...], ...] = ()

    def described(self, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
        """Returns the log probabilities of the first token, with what the prompt gave."""
        if self.embedding is None and not self.prompt:
            return logprobs
        embedding = () if self.embedding is None else tuple(self.embedding.tolist())
        return TokenLogprobs(() if logprobs is None else logprobs.top, embedding, self.prompt)


class PendingStep:
    """The tokens of a step that was launched. The step before it must have given its tokens first."""

    def __init__(self) -> None:
        self._passes: list[tuple[PendingSample, list[_PendingTokens]]] = []
        self._num_sampled = 0
        # Whether the next step can be launched before this one has given its tokens.
        self.may_run_ahead = True

    @property
    def sampled_ids(self) -> list[Tensor]:
        """The sampled ids of each forward pass, on the device."""
        return [sample.token_ids for sample, _ in self._passes]

    def add(
        self,
        sample: PendingSample,
        request_ids: Sequence[RequestId],
        rows: Sequence[RequestRow],
        embeddings: Mapping[RequestId, Tensor] | None = None,
    ) -> None:
        """Adds a forward pass with these requests: each of them expects a token from now on, except with drafts.

        `embeddings` come with the tokens of their requests.
        """
        pending = []
        for request_id, row in zip(request_ids, rows, strict=True):
            prompt = row.take_prompt_logprobs()
            index = None if row.draft_ids else row.expect(self._num_sampled)
            embedding = None if embeddings is None else embeddings.get(request_id)
            pending.append(_PendingTokens(request_id, row, index, row.num_corrections, embedding, prompt))
            self._num_sampled += 1 + len(row.draft_ids)
            self.may_run_ahead &= index is not None
        self.may_run_ahead &= sample.may_run_ahead
        self._passes.append((sample, pending))

    def tokens(self) -> list[SampledToken]:
        """Waits for the device and returns the sampled tokens, in order. Call it once.

        A request with drafts gets the drafts that were accepted and one more token. A request gets none if its chunk
        was computed behind an id that the host has corrected.
        """
        with torch.inference_mode():
            return [token for each in self._passes for token in _taken(*each)]


def _taken(sample: PendingSample, pending: Sequence[_PendingTokens]) -> list[SampledToken]:
    sampled = sample.result()
    token_ids, logprobs = sampled.token_ids, sampled.logprobs
    tokens: list[SampledToken] = []
    stop = 0
    for each in pending:
        first, row = stop, each.row
        stop += 1 + len(row.draft_ids)
        if each.index is None:
            taken = range(first, first + row.accept(token_ids[first:stop]))
            tokens += [
                SampledToken(
                    each.request_id,
                    token_ids[place],
                    each.described(logprobs[place]) if place == first else logprobs[place],
                    is_nan=place in sampled.nan,
                )
                for place in taken
            ]
        elif each.num_corrections == row.num_corrections:
            is_corrected = False
            if first in sampled.repeated:
                is_corrected = row.correct(each.index, token_ids[first])
            else:
                row.learn(each.index, token_ids[first])
            described = each.described(logprobs[first])
            is_nan = first in sampled.nan
            tokens.append(SampledToken(each.request_id, token_ids[first], described, is_corrected, is_nan))
    return tokens
