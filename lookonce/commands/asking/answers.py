"""Prints answers: as text for people, or as one JSON object for programs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from lookonce.client import TextStream
from lookonce.commands.output import err, visible
from lookonce.generation import Choice, Generation, ToolCall, Usage

# Fields of further answers that are there even if they are empty.
_ALWAYS = ("text", "token_ids", "finish_reason")


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
    answer = stream.generation
    if answer.text or not answer.tool_calls:
        sys.stdout.write("\n")
    sys.stdout.write("".join(map(_call_line, answer.tool_calls)))
    sys.stdout.flush()
    err.print(f"[dim]{escape(usage_line(answer.usage))}[/]", soft_wrap=True)


def print_answers(answer: Generation) -> None:
    """Prints several answers to one question, each behind its number, and their cost to stderr."""
    choices: list[Generation | Choice] = [answer, *answer.others]
    for number, choice in enumerate(choices, start=1):
        sys.stdout.write(f"[{number}] {visible(choice.text)}\n")
        sys.stdout.write("".join(map(_call_line, choice.tool_calls)))
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
    if answer.prompt_logprobs:
        content["prompt_logprobs"] = answer.prompt_logprobs
    if answer.reasoning:
        content["reasoning"] = answer.reasoning
    if answer.tool_calls:
        content["tool_calls"] = [asdict(call) for call in answer.tool_calls]
    if answer.others:
        content["others"] = [_other(choice) for choice in answer.others]
    return content


def _other(choice: Choice) -> dict[str, Any]:
    content = asdict(choice)
    return {name: value for name, value in content.items() if name in _ALWAYS or value}


def _call_line(call: ToolCall) -> str:
    return f"{call.name}({visible(call.arguments)})\n"


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
