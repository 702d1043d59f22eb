"""The output of responses: its items, and the events that tell of them as they grow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from gateway_svc.apis.answer_parts import AnswerPart, AnswerParts, PartKind, Step, delta_of
from lookonce.generation import Delta, FinishReason, Generation

OutputEvent: TypeAlias = tuple[str, dict[str, Any]]
"""The name of an event, without `response.`, and its fields."""

_ID_PREFIXES: Mapping[PartKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}
# Names of the events in which an item grows.
_GROWING: Mapping[PartKind, str] = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
}


def status_of(reason: FinishReason | None) -> str:
    """Returns the status of a response, or of its last item, by the reason for its end; None: it has not ended."""
    if reason is None:
        return "in_progress"
    return "completed" if reason in ("stop", "tool_calls") else "incomplete"


class ResponseOutput:
    """The output of one response, which grows with its answer."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._parts = AnswerParts()
        # Log-probabilities of the open text.
        self._logprobs: list[Mapping[str, Any]] = []
        # The items that have ended.
        self.items: list[dict[str, Any]] = []

    def add(self, delta: Delta, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[OutputEvent]:
        """Yields the events for an addition to the answer. `logprobs` are those of its text's tokens."""
        for step in self._parts.add(delta):
            yield from self._events(step, "completed", logprobs if step.part.kind == "text" else ())

    def end(self, reason: FinishReason, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[OutputEvent]:
        """Yields the events at the end of the answer. `logprobs` are those of the tokens behind the last addition."""
        for step in self._parts.end():
            if step.kind == "end" and step.part.kind == "text" and logprobs:
                yield from self._grown(step.part, "", logprobs)
            yield from self._events(step, status_of(reason), ())

    def take(self, generation: Generation) -> None:
        """Adds a whole answer, without events."""
        for _ in chain(self.add(delta_of(generation), ()), self.end(generation.finish_reason, ())):
            pass

    def _events(self, step: Step, status: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[OutputEvent]:
        match step.kind:
            case "begin":
                yield from self._begun(step.part)
            case "grow":
                yield from self._grown(step.part, step.text, logprobs)
            case "end":
                yield from self._ended(step.part, status)

    def _begun(self, part: AnswerPart) -> Iterator[OutputEvent]:
        self._logprobs = []
        item = self._item(part, "in_progress", [])
        yield "output_item.added", {"output_index": part.index, "item": item}
        if part.kind != "call":
            yield "content_part.added", {**self._place(part), "part": self._content(part)}

    def _grown(self, part: AnswerPart, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[OutputEvent]:
        self._logprobs += logprobs
        values = {**self._place(part), "delta": text}
        if part.kind == "text":
            values["logprobs"] = list(logprobs)
        yield f"{_GROWING[part.kind]}.delta", values

    def _ended(self, part: AnswerPart, status: str) -> Iterator[OutputEvent]:
        place, done = self._place(part), f"{_GROWING[part.kind]}.done"
        content: list[dict[str, Any]] = []
        if part.kind == "call":
            yield done, {**place, "name": part.name, "arguments": part.text}
        else:
            content.append(self._content(part))
            logprobs = {"logprobs": list(self._logprobs)} if part.kind == "text" else {}
            yield done, {**place, "text": part.text, **logprobs}
            yield "content_part.done", {**place, "part": content[0]}
        item = self._item(part, status, content)
        self.items.append(item)
        yield "output_item.done", {"output_index": part.index, "item": item}

    def _place(self, part: AnswerPart) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(part), "output_index": part.index}
        return place if part.kind == "call" else {**place, "content_index": 0}

    def _id(self, part: AnswerPart) -> str:
        suffix = f"_{part.number}" if part.number else ""
        return f"{_ID_PREFIXES[part.kind]}_{self._request_id}{suffix}"

    def _item(self, part: AnswerPart, status: str, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns an item; `content` is that of texts and reasoning."""
        item: dict[str, Any] = {"id": self._id(part), "status": status}
        match part.kind:
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": list(content)}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": list(content)}
            case "call":
                values = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
                return {**item, "type": "function_call", **values}

    def _content(self, part: AnswerPart) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": list(self._logprobs)}
