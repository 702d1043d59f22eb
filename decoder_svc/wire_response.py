"""Converts plain types into the decoder's protobuf messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf import duration_pb2

from decoder_svc.answer.generated_text import TextIncrement
from decoder_svc.engine.figures import EngineLoad
from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.request_output import FinishReason, RequestUsage, TokenLogprobs
from decoder_svc.tools.tool import CallDelta
from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2

_FINISH_REASONS = {
    FinishReason.STOP: decoder_service_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: decoder_service_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: decoder_service_pb2.FINISH_REASON_ABORT,
}


def finish_reason(increment: TextIncrement) -> decoder_service_pb2.FinishReason.ValueType:
    """Converts the reason why a choice ended, from its last increment."""
    if increment.ends_with_calls:
        return decoder_service_pb2.FINISH_REASON_TOOL_CALLS
    assert increment.finish_reason is not None, "the last increment has a reason"
    return _FINISH_REASONS[increment.finish_reason]


def complete(choice: decoder_service_pb2.Choice, increments: Sequence[TextIncrement]) -> None:
    """Adds the text of an answer that has ended, its calls and the reason for its end to a choice."""
    choice.text = "".join(increment.text for increment in increments)
    choice.reasoning = "".join(increment.reasoning for increment in increments)
    choice.tool_calls.extend(_tool_calls([delta for increment in increments for delta in increment.calls]))
    choice.finish_reason = finish_reason(increments[-1])


def keep_best(response: decoder_service_pb2.GenerateResponse, number: int, *, keeps_logprobs: bool) -> None:
    """Keeps the choices whose tokens have the highest mean log probability, the best one first, and numbers them."""

    def mean(choice: decoder_service_pb2.Choice) -> float:
        values = [position.top[0].logprob for position in choice.logprobs]
        return sum(values) / len(values) if values else -math.inf

    best = sorted(response.choices, key=mean, reverse=True)[:number]
    del response.choices[:]
    for index, choice in enumerate(best):
        choice.index = index
        if not keeps_logprobs:
            del choice.logprobs[:]
    response.choices.extend(best)


def _tool_calls(deltas: Sequence[CallDelta]) -> list[decoder_service_pb2.ToolCall]:
    """Returns the whole calls of an answer from all their parts."""
    calls: list[decoder_service_pb2.ToolCall] = []
    texts: list[list[str]] = []
    for delta in deltas:
        if delta.id:
            calls.append(decoder_service_pb2.ToolCall(id=delta.id, name=delta.name))
            texts.append([])
        texts[delta.index].append(delta.arguments)
    for call, pieces in zip(calls, texts, strict=True):
        call.arguments = "".join(pieces)
    return calls


def usage(record: RequestUsage) -> decoder_service_pb2.Usage:
    """Converts token counts and times of a request."""
    return decoder_service_pb2.Usage(
        prompt_tokens=record.prompt_tokens,
        cached_prompt_tokens=record.cached_prompt_tokens,
        image_tokens=record.image_tokens,
        cached_image_tokens=record.cached_image_tokens,
        skipped_image_tokens=record.skipped_image_tokens,
        encoded_image_tokens=record.encoded_image_tokens,
        completion_tokens=record.completion_tokens,
        accepted_draft_tokens=record.accepted_draft_tokens,
        queue_time=_duration(record.queue_time_s),
        time_to_first_token=_duration(record.time_to_first_token_s),
    )


def token_logprobs(positions: Sequence[TokenLogprobs]) -> list[decoder_service_pb2.TokenLogprobs]:
    """Returns one message per generated token."""
    return [
        decoder_service_pb2.TokenLogprobs(
            top=[decoder_service_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in position.top]
        )
        for position in positions
    ]


def prompt_logprobs(
    positions: Sequence[Sequence[tuple[int, float]]],
) -> list[decoder_service_pb2.TokenLogprobs]:
    """Returns one message per token of a prompt but the first. Thousands of them take some 100 ms."""
    return token_logprobs([TokenLogprobs(tuple(position)) for position in positions])


def delta(increment: TextIncrement, index: int, token_index: int) -> decoder_service_pb2.StreamDelta:
    """Converts one increment of the choice `index`. `token_index` is the index of its first token in the answer."""
    return decoder_service_pb2.StreamDelta(
        index=index,
        text=increment.text,
        token_ids=increment.token_ids,
        token_index=token_index,
        logprobs=token_logprobs(increment.logprobs),
        reasoning=increment.reasoning,
        tool_calls=[
            decoder_service_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in increment.calls
        ],
    )


def add_to_score(score: decoder_service_pb2.Score, increment: TextIncrement, num_logprobs: int | None) -> None:
    """Adds the next tokens of a continuation to its score, with their alternatives if any are asked for."""
    if not score.token_ids:
        score.is_greedy = True
    score.token_ids.extend(increment.token_ids)
    for position in increment.logprobs:
        (token_id, logprob), (likeliest_id, _), *_ = position.top
        score.token_logprobs.append(logprob)
        score.logprob += logprob
        score.is_greedy = score.is_greedy and token_id == likeliest_id
        if num_logprobs is not None:
            top = TokenLogprobs(position.top[: 1 + num_logprobs])
            score.logprobs.extend(token_logprobs([top]))


def embedding(values: Sequence[float], *, keeps_length: bool) -> list[float]:
    """Returns an embedding, divided by its length unless it keeps it. A zero stays as it is."""
    length = math.sqrt(math.fsum(value * value for value in values))
    return list(values) if keeps_length or length == 0 else [value / length for value in values]


def placeholder_range(item: ImageItem) -> decoder_service_pb2.PlaceholderRange:
    """Returns the range of an image's tokens in the prompt, with the image's key."""
    key = common_pb2.ContentKey(
        digest=item.key.digest,
        algorithm=common_pb2.HASH_ALGORITHM_SHA256,
        encoder_fingerprint=item.key.fingerprint,
    )
    return decoder_service_pb2.PlaceholderRange(offset=item.span.offset, length=item.span.length, key=key)


def load(figures: EngineLoad) -> decoder_service_pb2.GetLoadResponse:
    """Converts the engine's load for routers and autoscalers."""
    return decoder_service_pb2.GetLoadResponse(
        running_requests=figures.running_requests,
        waiting_requests=figures.waiting_requests,
        waiting_for_embeddings=figures.waiting_for_embeddings,
        kv_cache_usage=figures.kv_cache_usage,
        encoder_cache_rows=figures.encoder_cache_rows,
    )


def replica_load(figures: EngineLoad) -> decoder_service_pb2.ReplicaLoad:
    """Converts the engine's load for clients that choose between replicas."""
    return decoder_service_pb2.ReplicaLoad(
        running_requests=figures.running_requests, waiting_requests=figures.waiting_requests
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
