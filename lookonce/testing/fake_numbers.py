"""The numbers that a FakeServer answers: likelihoods of continuations, and embeddings of prompts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import InvalidParameterError
from lookonce.testing.fake_request import Continuation, FakeRequest

Likelihood: TypeAlias = "float | Callable[[FakeRequest, Continuation], float]"
"""The log-probability of every continuation, or a function that returns it."""
Embedding: TypeAlias = "Sequence[float] | Callable[[FakeRequest], Sequence[float]]"
"""The vector of every prompt, or a function that returns it."""

_NUM_DIMENSIONS = 8
_TOKEN_LOGPROB = -1.0


class FakeNumbers:
    """Answers score and embed requests as a test says."""

    def __init__(self, likelihood: Likelihood | None, embedding: Embedding | None) -> None:
        """None: likelihoods by the number of tokens, embeddings by the content."""
        self._likelihood = likelihood
        self._embedding = embedding

    def scores(self, received: FakeRequest, *, keeps_logprobs: bool) -> list[decoder_pb2.Score]:
        """Returns one score per continuation. Raises what the test's function raises, and InvalidParameterError."""
        if not received.continuations:
            raise InvalidParameterError("continuations", "must have at least one")
        scores = [self._score(received, one, keeps_logprobs=keeps_logprobs) for one in received.continuations]
        best = max(scores, key=lambda score: score.logprob)
        best.is_greedy = True
        return scores

    def embedding(self, received: FakeRequest, *, keeps_length: bool) -> list[float]:
        """Returns the vector of a prompt. Raises what the test's function raises."""
        given = self._embedding
        values = _vector_of(received) if given is None else list(given(received) if callable(given) else given)
        length = 1.0 if keeps_length else math.hypot(*values)
        return [value / length for value in values] if length else values

    def _score(self, received: FakeRequest, continuation: Continuation, *, keeps_logprobs: bool) -> decoder_pb2.Score:
        token_ids = range(len(continuation.split())) if isinstance(continuation, str) else continuation
        if not token_ids:
            raise InvalidParameterError("continuations", "one of them is empty")
        given = self._likelihood
        if given is None:
            logprob = _TOKEN_LOGPROB * len(token_ids)
        else:
            logprob = given(received, continuation) if callable(given) else given
        each = logprob / len(token_ids)
        score = decoder_pb2.Score(logprob=logprob, token_ids=token_ids, token_logprobs=[each] * len(token_ids))
        if keeps_logprobs:
            for token_id in token_ids:
                score.logprobs.add(top=[decoder_pb2.TokenLogprob(token_id=token_id, logprob=each)])
        return score


def _vector_of(received: FakeRequest) -> list[float]:
    """Returns numbers from -1 to 1 that depend on a request's text, images and adapter."""
    hasher = hashlib.sha256(f"{received.adapter}\n{received.text}".encode(errors="surrogatepass"))
    for image in received.images:
        hasher.update(image.digest)
    return [(byte - 127.5) / 127.5 for byte in hasher.digest()[:_NUM_DIMENSIONS]]
