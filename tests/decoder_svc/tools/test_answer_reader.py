"""Reading answers: the parts do not depend on the pieces in which the text comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.tools.answer_reader import REASONING_FORMATS, AnswerForm, AnswerReader
from decoder_svc.tools.call_reader import Functions
from decoder_svc.tools.tool_formats import TOOL_FORMATS

FORMS = {form.name: form for form in TOOL_FORMATS}
TYPES = {"f": {"x": frozenset({"integer"}), "s": frozenset({"string"})}, "g": dict[str, frozenset[str]]()}
THINK = REASONING_FORMATS[0]
# Text, reasoning, and calls of an answer.
Parts = tuple[str, str, list[tuple[str, str]]]

ANSWERS: list[tuple[str, str, Parts]] = [
    (
        "hermes",
        'So.\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "}</tool_call>\\"{"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>',
        ("So.", "", [("f", '{"x": 1, "s": "}</tool_call>\\"{"}'), ("g", "{}")]),
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call> and <tool_call>{"name": "g"}</tool_call>',
        ('<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call> and', "", [("g", "{}")]),
    ),
    ("hermes", " a <tool_ b", (" a <tool_ b", "", [])),
    ("hermes", "<tool_call> is a mark", ("<tool_call> is a mark", "", [])),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1', ("", "", [("f", '{"x": 1')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', ("", "", [("f", '{"x": 1}')])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1}, "id": "}"}</tool_call>ok',
        ("ok", "", [("f", '{"x": 1}')]),
    ),
    ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}', ('<tool_call>{"name": ["f"], "arguments": {}}', "", [])),
    ("hermes", '<tool_call>{"name": "g", "arguments": 5}', ('<tool_call>{"name": "g", "arguments": 5}', "", [])),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"x": 2}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
        ("", "", [("f", '{"x": 2}'), ("g", "{}")]),
    ),
    ("mistral", "[TOOL_CALLS]f[ARGS]5", ("[TOOL_CALLS]f[ARGS]5", "", [])),
    (
        "mistral_list",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        ("", "", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    ("python", "[f(x=-1, s='it]'), g()]", ("", "", [("f", '{"x": -1, "s": "it]"}'), ("g", "{}")])),
    ("python", "[1, 2]", ("[1, 2]", "", [])),
    ("python", "[__import__('os')]", ("[__import__('os')]", "", [])),
    (
        "llama",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    ("llama", '{"a": 1}', ('{"a": 1}', "", [])),
    ("llama", '{"name": "f", "arguments": {"x": 4}}', ("", "", [("f", '{"x": 4}')])),
    ("llama", '{"colour": "red", "name": "f"}', ('{"colour": "red", "name": "f"}', "", [])),
    ("llama", '{"name": "g"}', ('{"name": "g"}', "", [])),
    (
        "hermes",
        'I use <tool_call>{"name": "g", "arguments": {}}</tool_call> and\n<tool_call>{"name": "g"}</tool_call> more',
        ("I use and\nmore", "", [("g", "{}"), ("g", "{}")]),
    ),
    (
        "mistral_list",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"arguments": {}, "name": "g"}, {"name": "h", "a',
        ("", "", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    (
        "mistral_list",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "h", "arguments": {}}]',
        ('{"name": "h", "arguments": {}}]', "", [("f", '{"x": 1}')]),
    ),
    ("mistral_list", "[TOOL_CALLS] [5]", ("[TOOL_CALLS] [5]", "", [])),
    ("python", "[f(x=9e9999, s='')]", ("", "", [("f", '{"x": 9e9999, "s": ""}')])),
    (
        "glm",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</tool_call>b</arg_value>\n<arg_key>x</arg_key>\n"
        "<arg_value>1e999</arg_value>\n</tool_call>",
        ("", "", [("f", '{"s": "a</tool_call>b", "x": 1e999}')]),
    ),
    ("llama", 'It is {"a"}', ('It is {"a"}', "", [])),
    (
        "glm",
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>5</arg_value>\n<arg_key>s</arg_key>\n<arg_value>5</arg_value>\n"
        "</tool_call>",
        ("", "", [("f", '{"x": 5, "s": "5"}')]),
    ),
    (
        "qwen_xml",
        "Now:\n<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n<parameter=s>\n\nab\n\n</parameter>\n"
        "</function>\n</tool_call>",
        ("Now:", "", [("f", '{"x": 5, "s": "\\nab\\n"}')]),
    ),
    (
        "gemma",
        "<start_function_call>call:f{x:1,s:<escape>a,}b<escape>,l:[1,{k:<escape>v<escape>}]}<end_function_call>",
        ("", "", [("f", '{"x": 1, "s": "a,}b", "l": [1, {"k": "v"}]}')]),
    ),
    ("gemma4", '<|tool_call>call:f{x:1,s:<|"|>a<|"|>}<tool_call|>', ("", "", [("f", '{"x": 1, "s": "a"}')])),
    (
        "hermes",
        '<think>\nhm \n ok\n</think>\n\nfine <tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ("fine", "hm \n ok", [("g", "{}")]),
    ),
]


def read(form: AnswerForm, pieces: Sequence[str]) -> Parts:
    reader = AnswerReader(form)
    text, reasoning = "", ""
    calls: list[list[str]] = []
    ids = set()
    for got in [*map(reader.push, pieces), reader.flush()]:
        text, reasoning = text + got.text, reasoning + got.reasoning
        for delta in got.calls:
            if delta.id:
                assert delta.index == len(calls)
                ids.add(delta.id)
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
        if got.is_ended:
            break
    assert len(ids) == len(calls)
    assert reader.has_calls == bool(calls)
    return text, reasoning, [(name, arguments) for name, arguments in calls]


def with_functions(name: str, **fields: Any) -> AnswerForm:
    return AnswerForm(reasoning=THINK, functions=Functions(FORMS[name], TYPES), **fields)


@pytest.mark.parametrize(("name", "text", "expected"), ANSWERS, ids=range(len(ANSWERS)))
def test_parts_of_answers(name: str, text: str, expected: Parts) -> None:
    assert read(with_functions(name), [text]) == expected
    assert read(with_functions(name), list(text)) == expected


@given(st.data())
def test_pieces_make_no_difference(data: st.DataObject) -> None:
    name, text, expected = data.draw(st.sampled_from(ANSWERS))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(with_functions(name), pieces) == expected


@given(st.sampled_from(TOOL_FORMATS), st.lists(st.sampled_from(["{", "}", "[", '"', "\\", "f", " ", ":", "<think>"])))
def test_nothing_is_lost_of_what_is_no_call(form: Any, words: list[str]) -> None:
    """Any text that has neither a call nor reasoning comes out as it is."""
    text = "x" + "".join([form.begin if word == "f" else word for word in words])
    assert read(AnswerForm(functions=Functions(form, {"none": {}})), list(text)) == (text, "", [])


@pytest.mark.parametrize(
    ("text", "begins_in_reasoning", "expected"),
    [
        (" hm\n</think>\n\n Yes ", True, ("Yes ", "hm", [])),
        ("cut off ", True, ("", "cut off", [])),
        ("<think>\n\n</think>\n\nYes", False, ("Yes", "", [])),
        (" <thin", False, (" <thin", "", [])),
        ("  red", False, ("  red", "", [])),
        ("a <think> b", False, ("a <think> b", "", [])),
    ],
)
def test_reasoning(text: str, begins_in_reasoning: bool, expected: Parts) -> None:
    form = AnswerForm(reasoning=THINK, begins_in_reasoning=begins_in_reasoning)
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected


@pytest.mark.parametrize("name", ["hermes", "mistral_list", "glm"])
def test_an_answer_ends_behind_its_only_call(name: str) -> None:
    text = {
        "hermes": '<tool_call>{"name": "g", "arguments": {}}</tool_call>' * 2 + "more",
        "mistral_list": '[TOOL_CALLS][{"name": "g", "arguments": {}}, {"name": "f", "arguments": {}}] more',
        "glm": "<tool_call>g\n</tool_call>" * 2,
    }[name]
    form = with_functions(name, is_single_call=True)
    assert read(form, [text]) == read(form, list(text)) == ("", "", [("g", "{}")])


def test_a_forced_answer_that_is_cut_off_has_no_text() -> None:
    for name, text in (("hermes", '<tool_call>\n{"na'), ("python", "[f(x="), ("glm", "<tool_call>f\n<arg_key>")):
        assert read(with_functions(name, is_forced=True), [text]) == ("", "", [])


def test_calls_of_a_list_come_one_by_one() -> None:
    reader = AnswerReader(with_functions("mistral_list"))
    first = reader.push('[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name"')
    assert [(delta.index, delta.name, delta.arguments) for delta in first.calls] == [(0, "f", ""), (0, "", '{"x": 1}')]
    second = reader.push(': "g", "arguments": {}}]')
    assert [(delta.index, delta.name, delta.arguments) for delta in second.calls] == [(1, "g", ""), (1, "", "{}")]


def test_arguments_come_as_they_are_written() -> None:
    reader = AnswerReader(with_functions("hermes"))
    seen = [
        "".join(delta.arguments for delta in reader.push(piece).calls)
        for piece in ['<tool_call>{"name": "f", "arguments": {"s": "', "long", ' text"', "}}"]
    ]
    assert seen == ['{"s": "', "long", ' text"', "}"]
    assert json.loads("".join(seen)) == {"s": "long text"}
