"""The content of Anthropic's messages: its blocks, and the events that tell of them as they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeAlias

from gateway_svc.apis.answer_parts import AnswerPart, AnswerParts, Step, delta_of
from lookonce.generation import Delta, Generation

BlockEvent: TypeAlias = tuple[str, dict[str, Any]]
"""The name of an event, and its fields."""

# The name of arguments that are no JSON object, since `input` must be one.
_INVALID_JSON = "INVALID_JSON"


class MessageOutput:
    """The content of one message, which grows with its answer."""

    def __init__(self) -> None:
        self._parts = AnswerParts()

    def add(self, delta: Delta) -> Iterator[BlockEvent]:
        """Yields the events for an addition to the answer."""
        return map(_event, self._parts.add(delta))

    def end(self) -> Iterator[BlockEvent]:
        """Yields the events at the end of the answer."""
        return map(_event, self._parts.end())


def blocks_of(generation: Generation) -> list[dict[str, Any]]:
    """Returns the blocks of a whole answer."""
    parts = AnswerParts()
    steps = chain(parts.add(delta_of(generation)), parts.end())
    return [_block(step.part) for step in steps if step.kind == "end"]


def _event(step: Step) -> BlockEvent:
    place = {"index": step.part.index}
    match step.kind:
        case "begin":
            return "content_block_start", {**place, "content_block": _block(step.part)}
        case "grow":
            return "content_block_delta", {**place, "delta": _delta(step.part, step.text)}
        case "end":
            return "content_block_stop", place


def _block(part: AnswerPart) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text", "text": part.text}
        case "reasoning":
            # Only Anthropic signs.
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part.text)}


def _delta(part: AnswerPart, text: str) -> dict[str, str]:
    match part.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _input(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; those of a call that has just begun are empty."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {_INVALID_JSON: arguments}
