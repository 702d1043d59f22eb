"""The usage of several answers to one prompt."""

from __future__ import annotations

from decoder_svc.answer.choices import combined
from decoder_svc.scheduling.request_output import RequestUsage


def test_the_prompt_counts_once_and_answers_add_up() -> None:
    first = RequestUsage(50, 16, 20, 5, 0, 15, completion_tokens=4, queue_time_s=0.2, time_to_first_token_s=0.5)
    second = RequestUsage(50, 48, 20, 0, 5, 15, completion_tokens=6, queue_time_s=0.3, time_to_first_token_s=0.4)
    waiting = RequestUsage()
    found = combined([waiting, second, first])
    assert (found.prompt_tokens, found.cached_prompt_tokens, found.completion_tokens) == (50, 16, 10)
    # The encode that the second one counts was for the rows that the first one waited for.
    assert (found.encoded_image_tokens, found.cached_image_tokens, found.skipped_image_tokens) == (5, 0, 15)
    assert (found.queue_time_s, found.time_to_first_token_s) == (0.2, 0.4)
    assert combined([first]) is first
    assert combined([waiting, waiting]) == waiting
