"""An answer is divided into parts that begin, grow and end one after the other."""

from __future__ import annotations

import pytest

from gateway_svc.apis.answer_parts import AnswerParts, delta_of
from lookonce.generation import Delta, Generation, ToolCall, ToolCallDelta, Usage

USAGE = Usage(0, 0, 0, 0, 0, 0, 0, queue_time_s=0.0, time_to_first_token_s=0.0)
HEAD, TAIL = ToolCallDelta(0, '{"a"', "c0", "f"), ToolCallDelta(0, ": 1}")
SECOND = ToolCallDelta(1, "{}", "c1", "g")


def told(*deltas: Delta) -> list[str]:
    """Returns all steps in words."""
    parts = AnswerParts()
    steps = []
    for delta in deltas:
        steps += [f"{step.kind} {step.part.index} {step.part.kind} {step.text}".rstrip() for step in parts.add(delta)]
    return steps + [f"{step.kind} {step.part.index} {step.part.kind} {step.part.text}" for step in parts.end()]


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([], ["begin 0 text ", "end 0 text "]),
        ([Delta("a"), Delta("b")], ["begin 0 text", "grow 0 text a", "grow 0 text b", "end 0 text ab"]),
        (
            [Delta("a", "r", (HEAD,)), Delta(tool_calls=(TAIL,))],
            [
                "begin 0 reasoning",
                "grow 0 reasoning r",
                "end 0 reasoning",
                "begin 1 text",
                "grow 1 text a",
                "end 1 text",
                "begin 2 call",
                'grow 2 call {"a"',
                "grow 2 call : 1}",
                'end 2 call {"a": 1}',
            ],
        ),
        (
            # The end of a call comes with the text behind it, and with the next call.
            [Delta(tool_calls=(HEAD,)), Delta("a", tool_calls=(TAIL, SECOND))],
            [
                "begin 0 call",
                'grow 0 call {"a"',
                "grow 0 call : 1}",
                "end 0 call",
                "begin 1 text",
                "grow 1 text a",
                "end 1 text",
                "begin 2 call",
                "grow 2 call {}",
                "end 2 call {}",
            ],
        ),
        ([Delta(tool_calls=(ToolCallDelta(0, "", "c0", "f"),))], ["begin 0 call", "end 0 call "]),
    ],
)
def test_steps(deltas: list[Delta], expected: list[str]) -> None:
    assert told(*deltas) == expected


def test_parts_are_numbered_by_kind() -> None:
    parts = AnswerParts()
    deltas = (Delta("a"), Delta(tool_calls=(HEAD,)), Delta("b"), Delta(tool_calls=(SECOND,)))
    begun = [step.part for delta in deltas for step in parts.add(delta) if step.kind == "begin"]
    assert [(part.kind, part.number, part.call_id) for part in begun] == [
        ("text", 0, ""),
        ("call", 0, "c0"),
        ("text", 1, ""),
        ("call", 1, "c1"),
    ]


def test_a_whole_answer_is_one_addition() -> None:
    calls = (ToolCall("c0", "f", "{}"), ToolCall("c1", "g", "[]"))
    generation = Generation("a", (), "tool_calls", USAGE, "id", tool_calls=calls, reasoning="r")
    assert told(delta_of(generation))[-6:] == [
        "begin 2 call",
        "grow 2 call {}",
        "end 2 call",
        "begin 3 call",
        "grow 3 call []",
        "end 3 call []",
    ]
