"""Token counts of answers in OpenAI's forms, with our counts of images beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.answers import Ask, Event
from gateway_svc.apis.parsing.fields import Fields
from lookonce.generation import Usage

_NONE = Usage(0, 0, 0, 0, 0, 0, 0, queue_time_s=0.0, time_to_first_token_s=0.0)


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """The wishes of a request about the usage in its stream (`stream_options`)."""

    # Whether the last event has the usage.
    is_included: bool = False
    # Whether all other events have the usage so far (an extension of vLLM).
    is_continuous: bool = False

    @classmethod
    def parse(cls, fields: Fields, *, streams: bool) -> UsageOptions:
        """Raises InvalidParameterError for options that are unknown or contradict each other."""
        if fields.raw("stream_options") is None:
            return cls()
        if not streams:
            raise fields.wrong("stream_options", "is for streams only")
        options = Fields.of(fields.raw("stream_options"), "stream_options").only(
            "include_usage", "include_obfuscation", "continuous_usage_stats"
        )
        if options.flag("include_obfuscation"):
            raise options.wrong("include_obfuscation", "is not supported")
        found = cls(options.flag("include_usage") or False, options.flag("continuous_usage_stats") or False)
        if found.is_continuous and not found.is_included:
            raise options.wrong("continuous_usage_stats", "needs include_usage: true")
        return found


class StreamedUsage:
    """The usage in the events of one stream."""

    def __init__(self, ask: Ask, options: UsageOptions) -> None:
        self._num_each = ask.num_each
        self._options = options
        self._usages = [_NONE] * ask.num_answers

    def note(self, one: Event) -> None:
        """Takes over the accounting that comes with a piece or an end."""
        self._usages[one.index] = one.usage

    @property
    def total(self) -> dict[str, Any]:
        """The usage of all answers so far."""
        return chat_usage(self._usages, self._num_each)

    @property
    def beside_choices(self) -> dict[str, Any]:
        """The `usage` field of an event that has choices; empty unless the request asked for usage."""
        if not self._options.is_included:
            return {}
        return {"usage": self.total if self._options.is_continuous else None}


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


def embedding_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Returns the usage of all inputs of a request for embeddings."""
    usage = chat_usage(usages, 1)
    return {name: value for name, value in usage.items() if not name.startswith("completion_tokens")}


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
