"""Grammars of forced calls: each text that they allow is read as calls that conform."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch

from decoder_svc.constraint.grammars import Grammars, named_control_ids
from decoder_svc.constraint.refusals import RefusedConstraintError
from decoder_svc.scheduling.sampling_params import Constraint
from decoder_svc.tools.answer_reader import REASONING_FORMATS, AnswerForm, AnswerReader
from decoder_svc.tools.call_grammar import call_constraint
from decoder_svc.tools.call_reader import Functions
from decoder_svc.tools.tool import Tool, ToolChoice, ToolMode
from decoder_svc.tools.tool_formats import TOOL_FORMATS, CallStyle
from lookonce.errors import InvalidParameterError, UnsupportedError
from tests.decoder_svc.constraint.demo_constraints import DEMO_VOCAB, demo_grammars

FORMS = {form.name: form for form in TOOL_FORMATS}
FORCED = sorted(name for name, form in FORMS.items() if form.style is not CallStyle.MARKED)
SCHEMAS: dict[str, dict[str, Any]] = {
    "a": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
    "b": {
        "type": "object",
        "properties": {"s": {"enum": ["u", "v"]}, "t": {"type": "string", "enum": ["w <x>"]}, "u": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "c": {
        "properties": {"p": {"type": "boolean"}, "q": {"type": "null"}, "r": {"enum": [1, 2]}},
        "required": ["q"],
        "additionalProperties": False,
    },
}
TOOLS = [Tool(name, "", json.dumps(schema)) for name, schema in SCHEMAS.items()]
REQUIRED = ToolChoice(ToolMode.REQUIRED)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


def constraint(
    name: str, choice: ToolChoice = REQUIRED, tools: Sequence[Tool] = TOOLS, **options: Any
) -> Constraint | None:
    control_ids: dict[str, int] = options.pop("control_ids", {})
    return call_constraint(
        tools,
        choice,
        FORMS[name],
        options.pop("reasoning", None),
        control_ids.get,
        begins_in_reasoning=False,
        **options,
    )


def random_answer(grammars: Grammars, constraint: Constraint, seed: int) -> str | None:
    """Returns an answer in which each token is drawn from those that the grammar allows; None if it does not end."""
    matcher = grammars.matcher(constraint)
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    while len(token_ids) < 300:
        if matcher.is_accepting() and (matcher.is_stopped() or torch.rand(1, generator=generator) < 0.3):
            return str(grammars.tokenizer.decode_str(token_ids))
        words = memoryview(matcher.compute_bitmask()).cast("I")
        allowed = [token_id for token_id in range(8, DEMO_VOCAB) if words[token_id // 32] >> token_id % 32 & 1]
        if not allowed:
            return str(grammars.tokenizer.decode_str(token_ids))
        token_ids.append(allowed[int(torch.randint(len(allowed), (1,), generator=generator))])
        assert matcher.consume_token(token_ids[-1])
    return None


def calls_in(name: str, text: str) -> list[tuple[str, str]]:
    types = {"b": {"t": frozenset({"string"})}}
    functions = Functions(FORMS[name], {key: types.get(key, {}) for key in SCHEMAS})
    reader = AnswerReader(AnswerForm(functions=functions))
    calls: list[list[str]] = []
    for read in (reader.push(text), reader.flush()):
        assert read.text.strip() == ""
        for delta in read.calls:
            if delta.id:
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return [(called, arguments) for called, arguments in calls]


@pytest.mark.parametrize("name", FORCED)
def test_every_allowed_answer_is_calls_that_conform(grammars: Grammars, name: str) -> None:
    required = constraint(name)
    assert required is not None
    called: list[str] = []
    for seed in range(40):
        text = random_answer(grammars, required, seed)
        if text is None:
            continue
        found = calls_in(name, text)
        assert found, text
        for function, arguments in found:
            jsonschema.validate(json.loads(arguments), SCHEMAS[function])
        called += [function for function, _ in found]
    assert set(called) == set(SCHEMAS)
    assert len(called) > 40


@pytest.mark.parametrize("name", FORCED)
def test_a_named_function_is_called_once(grammars: Grammars, name: str) -> None:
    named = constraint(name, ToolChoice(ToolMode.NAMED, "b"))
    assert named is not None
    for seed in range(10):
        text = random_answer(grammars, named, seed)
        assert text is not None
        assert [function for function, _ in calls_in(name, text)] == ["b"]


def test_a_free_choice_has_no_constraint_unless_a_function_is_strict() -> None:
    auto = ToolChoice(ToolMode.AUTO)
    assert constraint("hermes", auto) is None
    strict = [Tool("a", "", "", is_strict=True)]
    ids = {"<tool_call>": 4, "</tool_call>": 5}
    found = constraint("hermes", auto, strict, control_ids=ids)
    assert found is not None
    assert named_control_ids(found) == {4, 5}
    with pytest.raises(UnsupportedError):
        constraint("hermes", auto, strict)
    with pytest.raises(UnsupportedError):
        constraint("llama", auto, strict)


def test_text_before_a_strict_call_does_not_spell_its_mark(grammars: Grammars) -> None:
    """It would be read as a call with any arguments. The demo model's tokenizer has no such token; any id will do."""
    ids = {"<tool_call>": 4, "</tool_call>": 3}
    strict = [Tool("a", "", "", is_strict=True)]
    found = constraint("hermes", ToolChoice(ToolMode.AUTO), strict, control_ids=ids)
    assert found is not None

    def allows(text: str) -> bool:
        matcher = grammars.matcher(found)
        return all(matcher.consume_token(one) for one in grammars.tokenizer.tokenize_str(text))

    assert allows("You wrote <tool_ call> and <tool_call, and no more")
    assert not allows('You wrote <tool_call>{"name": "a", "arguments": {"x": "bad"}}</tool_call> as text')


def test_reasoning_may_come_before_a_forced_call(grammars: Grammars) -> None:
    found = constraint("hermes", reasoning=REASONING_FORMATS[0])
    assert found is not None
    matcher = grammars.matcher(found)
    text = '<think>any <text>\n</think>\n<tool_call>\n{"name": "a", "arguments": {"x": 5}}\n</tool_call>'
    for token_id in grammars.tokenizer.tokenize_str(text):
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting()


def parameters(**schema: Any) -> list[Tool]:
    return [Tool("a", "", json.dumps(schema))]


REFUSED: dict[str, tuple[str, list[Tool], str]] = {
    "no object": ("hermes", parameters(type="string"), "chat.tools[0].parameters"),
    "keyword of tags": ("glm", parameters(minProperties=1), "chat.tools[0].parameters"),
    "text of tags": (
        "glm",
        parameters(properties={"x": {"type": "string", "maxLength": 3}}),
        "chat.tools[0].parameters.properties.x",
    ),
    "empty choice": (
        "glm",
        parameters(properties={"x": {"type": "string", "enum": [1]}}),
        "chat.tools[0].parameters.properties.x",
    ),
    "no name of Python": ("python", parameters(properties={"from": {}}), "chat.tools[0]"),
    "dash": ("python", parameters(properties={"a-b": {}}), "chat.tools[0]"),
    "normalised": ("python", parameters(properties={"\N{MATHEMATICAL BOLD SCRIPT SMALL A}": {}}), "chat.tools[0]"),
    "tag in a name": ("qwen_xml", parameters(properties={"a>b": {}}), "chat.tools[0]"),
    "space around a name": ("glm", parameters(properties={" a": {}}), "chat.tools[0]"),
    "tag in a text": (
        "glm",
        parameters(properties={"x": {"type": "string", "const": "</tool_call>"}}),
        "chat.tools[0].parameters.properties.x",
    ),
    "unknown required": ("python", parameters(properties={}, required=["x"]), "chat.tools[0].parameters.required"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schemas_that_cannot_be_forced_are_named(case: str) -> None:
    name, tools, field = REFUSED[case]
    with pytest.raises(InvalidParameterError) as caught:
        constraint(name, tools=tools)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["class", "a-b", "1f"])
def test_a_function_whose_name_python_does_not_have_is_named(name: str) -> None:
    with pytest.raises(InvalidParameterError, match="no name"):
        constraint("python", tools=[Tool(name, "", "")])


@pytest.mark.parametrize("name", FORCED)
def test_definitions_are_known_to_each_argument(grammars: Grammars, name: str) -> None:
    colour = {"enum": ["u", "v"]}
    schema = {"properties": {"s": {"$ref": "#/$defs/Colour"}}, "required": ["s"], "$defs": {"Colour": colour}}
    found = constraint(name, ToolChoice(ToolMode.NAMED, "b"), [Tool("b", "", json.dumps(schema))])
    assert found is not None
    grammars.check(found)
    values = set()
    for seed in range(8):
        text = random_answer(grammars, found, seed)
        if text is not None:
            ((_, arguments),) = calls_in(name, text)
            values.add(json.loads(arguments)["s"])
    assert values == {"u", "v"}


@pytest.mark.parametrize("name", ["glm", "qwen_xml"])
def test_a_text_between_tags_has_no_tag(grammars: Grammars, name: str) -> None:
    schema = {"properties": {"t": {"type": "string"}}, "required": ["t"]}
    found = constraint(name, ToolChoice(ToolMode.NAMED, "b"), [Tool("b", "", json.dumps(schema))])
    assert found is not None
    form = FORMS[name]
    head = f"{form.begin}{form.name_begin}b{form.name_end}{form.key_begin}t{form.key_end}"
    tail = f"{form.value_end}{form.arguments_end}{form.end}"

    def is_allowed(text: str) -> bool:
        matcher = grammars.matcher(found)
        ids = grammars.tokenizer.tokenize_str(f"{head}{text}{tail}")
        return all(matcher.consume_token(token_id) for token_id in ids) and matcher.is_accepting()

    assert is_allowed("any < text > of\nlines & {}")
    for tag in (form.key_begin, form.end):
        assert not is_allowed(f"a {tag} b")


def test_a_form_without_a_grammar_is_named() -> None:
    with pytest.raises(UnsupportedError, match="gemma"):
        constraint("gemma")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"if": {}}, r"\[0\]\.parameters: .*if"),
        (
            {"properties": {"x": {"pattern": "\\b"}}},
            r"\[0\]\.parameters: .*pattern.*properties\.x|\[0\]\.parameters: .*x",
        ),
        ({"properties": {"x": {"minimum": 1e300}}}, r"\[0\]\.parameters: .*digits"),
    ],
)
def test_unsupported_schemas_are_refused_with_their_place(
    grammars: Grammars, schema: dict[str, Any], reason: str
) -> None:
    found = constraint("hermes", tools=parameters(**schema))
    assert found is not None
    with pytest.raises(RefusedConstraintError, match=reason):
        grammars.check(found)
