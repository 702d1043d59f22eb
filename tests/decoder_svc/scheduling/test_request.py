"""The end of a request: stop ids, its own limit, the context."""

from __future__ import annotations

import pytest

from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=frozenset({9}))


def generated(*token_ids: int) -> Request:
    one = Request(RequestId("a"), Prompt((1, 2, 3)), PARAMS, arrival_s=0.0)
    one.token_ids += token_ids
    return one


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ((7,), None),
        # A stop id among the first min_tokens tokens does not end the request.
        ((9,), None),
        ((7, 9), None),
        ((7, 7, 9), FinishReason.STOP),
        # Only the latest token can be the last.
        ((9, 7, 7), None),
        ((7, 7, 7, 7, 7), FinishReason.LENGTH),
        # Both reasons hold: the model's own end counts.
        ((7, 7, 7, 7, 9), FinishReason.STOP),
    ],
)
def test_the_latest_token_ends_a_request_by_its_id_or_by_the_limit(
    token_ids: tuple[int, ...], expected: FinishReason | None
) -> None:
    assert generated(*token_ids).finish_reason_now(max_context_tokens=100) is expected


@pytest.mark.parametrize(("max_context_tokens", "expected"), [(6, None), (5, FinishReason.LENGTH)])
def test_a_full_context_ends_a_request(max_context_tokens: int, expected: FinishReason | None) -> None:
    assert generated(7, 7).finish_reason_now(max_context_tokens) is expected


def test_usage_begins_with_the_prompts_tokens_and_counts_follow_the_ids() -> None:
    one = generated(7, 8)
    assert (one.num_prompt_tokens, one.num_output_tokens, one.num_tokens) == (3, 2, 5)
    assert one.output_token_ids == [7, 8]
    assert one.usage.prompt_tokens == 3
