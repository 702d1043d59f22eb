"""Token counts of answers in OpenAI's forms, with our counts of images beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookonce.generation import Usage


def chat_usage(usages: Sequence[Usage], num_each: int) -> dict[str, Any]:
    """Returns the usage of all answers to one request, `num_each` to a prompt. Each prompt counts once.

    Of its tokens, those count as cached that were so for the first answer that was computed.
    """
    prompts = usages[::num_each]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(
                min(usage.cached_prompt_tokens for usage in usages[start : start + num_each])
                for start in range(0, len(usages), num_each)
            ),
            "image_tokens": sum(usage.image_tokens for usage in prompts),
        },
        "lookonce": image_usage(usages),
    }


def responses_usage(usage: Usage) -> dict[str, Any]:
    """Returns the usage of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "lookonce": image_usage([usage]),
    }


def image_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Returns what became of the images, summed over the answers, and the times of the first answer, seconds."""
    return {
        "image_tokens": sum(usage.image_tokens for usage in usages),
        "encoded_image_tokens": sum(usage.encoded_image_tokens for usage in usages),
        "cached_image_tokens": sum(usage.cached_image_tokens for usage in usages),
        "skipped_image_tokens": sum(usage.skipped_image_tokens for usage in usages),
        "queue_time_s": usages[0].queue_time_s,
        "time_to_first_token_s": usages[0].time_to_first_token_s,
    }
