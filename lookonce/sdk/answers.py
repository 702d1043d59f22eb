"""Converts the answers of decoders from protobuf to plain data, for both clients. Calls no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from google.protobuf.duration_pb2 import Duration

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import InternalError
from lookonce.generation import (
    Choice,
    Delta,
    FinishReason,
    Generation,
    PromptEmbedding,
    Score,
    Scoring,
    TokenLogprobs,
    Usage,
)
from lookonce.sdk.tools import GrowingCalls, calls_of, delta_of

_FINISH_REASONS: Mapping[int, FinishReason] = {
    decoder_pb2.FINISH_REASON_STOP: "stop",
    decoder_pb2.FINISH_REASON_LENGTH: "length",
    decoder_pb2.FINISH_REASON_ABORT: "abort",
    decoder_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_NOTHING = Delta()


class Transcript:
    """Collects the events of one choice's stream; checks that it has no gap and exactly one end."""

    def __init__(self) -> None:
        self._request_id = ""
        self._pieces: list[str] = []
        self._reasoning: list[str] = []
        self._calls = GrowingCalls()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._started = decoder_pb2.StreamStarted()
        self._finished: decoder_pb2.StreamFinished | None = None

    @property
    def has_content(self) -> bool:
        """Whether any part of the answer has arrived. A stream that has shown one cannot be started again."""
        return bool(self._pieces or self._reasoning or self._calls.whole())

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """The log-probabilities of the tokens so far, if they were asked for."""
        return self._logprobs

    def add(self, response: decoder_pb2.GenerateStreamResponse) -> Delta | None:
        """Adds one event and returns what it adds to the answer; None for nothing.

        Raises InternalError on a gap or a second end.
        """
        if response.HasField("started"):
            self._started = response.started
            self._request_id = response.started.request_id
        elif response.HasField("finished"):
            if self._finished is not None:
                raise self._broken("the stream ended twice")
            self._finished = response.finished
        elif response.HasField("delta"):
            return self._add_delta(response.delta)
        return None

    def _add_delta(self, delta: decoder_pb2.StreamDelta) -> Delta | None:
        if delta.token_ids and delta.token_index != len(self._token_ids):
            raise self._broken(f"the stream has a gap: token {delta.token_index} follows {len(self._token_ids)}")
        self._token_ids += delta.token_ids
        self._logprobs += _logprobs(delta.logprobs)
        added = delta_of(delta)
        if added.text:
            self._pieces.append(added.text)
        if added.reasoning:
            self._reasoning.append(added.reasoning)
        if not self._calls.add(added.tool_calls):
            raise self._broken("the stream has a gap in its calls")
        return added if added != _NOTHING else None

    @property
    def usage_so_far(self) -> Usage:
        """The token accounting up to the latest event; zeros before the first one."""
        if self._finished is not None:
            return usage_of(self._finished.usage)
        return replace(usage_of(self._started.usage), completion_tokens=len(self._token_ids))

    def generation(self) -> Generation:
        """Returns the whole answer. Raises InternalError if the stream has not finished."""
        if self._finished is None:
            raise self._broken("the stream stopped before its final event")
        return Generation(
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            finish_reason=_FINISH_REASONS.get(self._finished.finish_reason, "abort"),
            usage=usage_of(self._finished.usage),
            request_id=self._request_id,
            logprobs=tuple(self._logprobs),
            tool_calls=self._calls.whole(),
            reasoning="".join(self._reasoning),
        )

    def _broken(self, message: str) -> InternalError:
        return _error_of(message, self._request_id)


def generation_of(response: decoder_pb2.GenerateResponse) -> Generation:
    """Returns the choices of a response. Raises InternalError if it has none."""
    if not response.choices:
        raise _error_of("the answer has no choice", response.request_id)
    first, *others = [
        Choice(
            text=choice.text,
            token_ids=tuple(choice.token_ids),
            finish_reason=_FINISH_REASONS.get(choice.finish_reason, "abort"),
            logprobs=tuple(_logprobs(choice.logprobs)),
            tool_calls=calls_of(choice),
            reasoning=choice.reasoning,
        )
        for choice in response.choices
    ]
    return Generation(
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=usage_of(response.usage),
        request_id=response.request_id,
        logprobs=first.logprobs,
        prompt_logprobs=tuple(_logprobs(response.prompt_logprobs)),
        others=tuple(others),
        tool_calls=first.tool_calls,
        reasoning=first.reasoning,
    )


def scoring_of(response: decoder_pb2.ScoreResponse, num_continuations: int) -> Scoring:
    """Returns the likelihoods of a response. Raises InternalError if there is not one for each continuation."""
    if len(response.scores) != num_continuations:
        raise _error_of(f"{len(response.scores)} scores for {num_continuations} continuations", response.request_id)
    scores = tuple(
        Score(
            score.logprob,
            tuple(score.token_ids),
            tuple(score.token_logprobs),
            score.is_greedy,
            tuple(_logprobs(score.logprobs)),
        )
        for score in response.scores
    )
    return Scoring(scores, usage_of(response.usage), response.request_id)


def embedding_of(response: decoder_pb2.EmbedResponse) -> PromptEmbedding:
    """Returns the embedding of a response. Raises InternalError if it has none."""
    if not response.embedding:
        raise _error_of("the answer has no embedding", response.request_id)
    return PromptEmbedding(tuple(response.embedding), usage_of(response.usage), response.request_id)


def _error_of(message: str, request_id: str) -> InternalError:
    """Returns an error that names the request, by which the server's log is searched."""
    error = InternalError(message)
    error.request_id = request_id or None
    return error


def usage_of(usage: decoder_pb2.Usage) -> Usage:
    """Converts the token accounting, with durations in seconds."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        image_tokens=usage.image_tokens,
        encoded_image_tokens=usage.encoded_image_tokens,
        cached_image_tokens=usage.cached_image_tokens,
        skipped_image_tokens=usage.skipped_image_tokens,
        completion_tokens=usage.completion_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
        queue_time_s=seconds_of(usage.queue_time),
        time_to_first_token_s=seconds_of(usage.time_to_first_token),
    )


def _logprobs(tokens: Sequence[decoder_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    return [tuple((entry.token_id, entry.logprob) for entry in token.top) for token in tokens]


def seconds_of(duration: Duration) -> float:
    """Returns a duration in seconds."""
    return duration.ToNanoseconds() / 1e9
