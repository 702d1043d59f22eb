"""Divides an answer into the parts that interfaces with content blocks have: reasoning, texts and calls, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lookonce.generation import Delta, Generation, ToolCallDelta

PartKind: TypeAlias = Literal["reasoning", "text", "call"]
StepKind: TypeAlias = Literal["begin", "grow", "end"]


@dataclass(slots=True)
class AnswerPart:
    """One part of an answer. It grows until it ends."""

    kind: PartKind
    # Index among all parts of the answer, and among those of its kind.
    index: int
    number: int
    # With the kind "call": id and function.
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """The beginning, the growth or the end of a part."""

    kind: StepKind
    part: AnswerPart
    # With the kind "grow": the new text.
    text: str = ""


class AnswerParts:
    """The parts of one answer. At most one of them is open: the last one."""

    def __init__(self) -> None:
        self._parts: list[AnswerPart] = []
        # The part that may still grow.
        self._open: AnswerPart | None = None

    def add(self, delta: Delta) -> Iterator[Step]:
        """Yields the steps that new text, reasoning and calls make."""
        num_of_open = next((i for i, call in enumerate(delta.tool_calls) if call.id), len(delta.tool_calls))
        # The end of a call may come together with a text behind it.
        for call in delta.tool_calls[:num_of_open]:
            yield from self._grow(call.arguments)
        if delta.reasoning:
            yield from self._grow_as("reasoning", delta.reasoning)
        if delta.text:
            yield from self._grow_as("text", delta.text)
        for call in delta.tool_calls[num_of_open:]:
            if call.id:
                yield from self._begin("call", call.id, call.name)
            yield from self._grow(call.arguments)

    def end(self) -> Iterator[Step]:
        """Yields the steps at the end of the answer. An answer without any part gets an empty text."""
        if not self._parts:
            yield from self._begin("text")
        yield from self._end_open()

    def _grow_as(self, kind: PartKind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        yield from self._grow(text)

    def _begin(self, kind: PartKind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._end_open()
        number = sum(part.kind == kind for part in self._parts)
        self._open = AnswerPart(kind, len(self._parts), number, call_id, name)
        self._parts.append(self._open)
        yield Step("begin", self._open)

    def _grow(self, text: str) -> Iterator[Step]:
        assert self._open is not None, "a part has begun"
        if text:
            self._open.pieces.append(text)
            yield Step("grow", self._open, text)

    def _end_open(self) -> Iterator[Step]:
        if self._open is not None:
            yield Step("end", self._open)
            self._open = None


def delta_of(generation: Generation) -> Delta:
    """Returns a whole answer as one addition to an empty one."""
    calls = [
        ToolCallDelta(index, call.arguments, call.id, call.name) for index, call in enumerate(generation.tool_calls)
    ]
    return Delta(generation.text, generation.reasoning, tuple(calls))
