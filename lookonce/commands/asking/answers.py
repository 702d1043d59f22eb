"""Prints answers: as text for people, or as one JSON object for programs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from lookonce.client import TextStream
from lookonce.commands.output import err, visible
from lookonce.generation import Choice, Generation, Usage


def stream_text(stream: TextStream) -> None:
    """Prints the text of an answer to stdout as it arrives, and to stderr the reasoning before it and its cost."""
    is_reasoning = False
    for delta in stream.deltas():
        if delta.reasoning:
            is_reasoning = True
            err.print(f"[dim]{escape(visible(delta.reasoning))}[/]", end="", soft_wrap=True)
        if delta.text:
            if is_reasoning:
                is_reasoning = False
                err.print()
            sys.stdout.write(visible(delta.text))
            sys.stdout.flush()
    if is_reasoning:
        err.print()
    sys.stdout.write("\n")
    sys.stdout.flush()
    err.print(f"[dim]{escape(usage_line(stream.usage))}[/]", soft_wrap=True)


def print_answers(answer: Generation) -> None:
    """Prints several answers to one question, each behind its number, and their cost to stderr."""
    texts = [answer.text, *(choice.text for choice in answer.others)]
    for number, text in enumerate(texts, start=1):
        sys.stdout.write(f"[{number}] {visible(text)}\n")
    sys.stdout.flush()
    err.print(f"[dim]{escape(usage_line(answer.usage))}[/]", soft_wrap=True)


def json_answer(answer: Generation, num_images: int, num_video_frames: int, total_time_s: float) -> dict[str, Any]:
    """Returns an answer as an object for JSON, with the words of `lookonce.generation`.

    `num_images` and `num_video_frames` are those that the prompt shows. `total_time_s` is the time of the whole call.
    """
    content: dict[str, Any] = {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "request_id": answer.request_id,
        "num_images": num_images,
        "num_video_frames": num_video_frames,
        "total_time_s": round(total_time_s, 6),
        "usage": asdict(answer.usage),
        "token_ids": answer.token_ids,
    }
    if answer.logprobs:
        content["logprobs"] = answer.logprobs
    if answer.reasoning:
        content["reasoning"] = answer.reasoning
    if answer.others:
        content["others"] = [_other(choice) for choice in answer.others]
    return content


def _other(choice: Choice) -> dict[str, Any]:
    content = asdict(choice)
    # The command asks for no calls.
    del content["tool_calls"]
    return {name: value for name, value in content.items() if name not in ("logprobs", "reasoning") or value}


def usage_line(usage: Usage) -> str:
    """Returns one line with the token counts and the latency of a generation."""
    parts = [f"{usage.prompt_tokens} prompt tokens"]
    if usage.image_tokens:
        rows = f"{usage.encoded_image_tokens} encoded, {usage.cached_image_tokens} from the shared cache"
        parts.append(f"image rows: {rows}, {usage.skipped_image_tokens} skipped")
    if usage.accepted_draft_tokens:
        parts.append(f"{usage.accepted_draft_tokens} of {usage.completion_tokens} tokens guessed")
    parts.append(f"first token after {usage.time_to_first_token_s * 1000:.0f} ms")
    return " · ".join(parts)
