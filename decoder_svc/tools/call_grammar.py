"""Grammars of answers that call functions, in Lark's notation as llguidance reads it.

The arguments of a function are a JSON schema, which the process with llguidance checks and puts into the grammar.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from decoder_svc.tools.answer_reader import ReasoningFormat
from decoder_svc.tools.tool import Tool, ToolChoice, ToolMode
from decoder_svc.tools.tool_formats import CallStyle, ToolFormat
from lookonce.errors import InvalidParameterError, UnsupportedError

_IN_FORM = "the form of this model's calls"
# Characters of tags, and line ends, which would change the name of an argument that is written between tags.
_NO_NAME = frozenset("<>\n\r\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x85")
_DEFINITIONS = ("$defs", "definitions")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANYTHING = r"/(.|\n)*/"
# Keywords that a text between tags may have.
_TEXT_KEYWORDS = frozenset({*_DEFINITIONS, "type", "title", "description", "default", "examples", "enum", "const"})


@dataclass(slots=True)
class _Grammar:
    """A grammar that grows by rules."""

    # Returns the id of a control token, or None for any other text.
    control_id: Callable[[str], int | None]
    rules: list[str] = field(default_factory=list)
    # JSON schemas of the rules json_0, json_1, …: the place of each in `chat.tools`, and its text.
    schemas: list[tuple[str, str]] = field(default_factory=list)
    control_ids: list[int] = field(default_factory=list)

    def text(self, text: str) -> str:
        """Returns the expression for a fixed text; a control token stands for itself."""
        if not text:
            return ""
        token_id = self.control_id(text)
        if token_id is None:
            return json.dumps(text)
        if token_id not in self.control_ids:
            self.control_ids.append(token_id)
        return f"<[{token_id}]>"

    def json(self, place: str, schema: Mapping[str, Any]) -> str:
        """Returns the name of a new rule for JSON."""
        self.schemas.append((place.removeprefix("chat.tools"), json.dumps(schema)))
        return f"json_{len(self.schemas) - 1}"

    def rule(self, name: str, expression: str) -> str:
        """Adds a rule and returns its name."""
        self.rules.append(f"{name}: {expression}")
        return name

    def anything_before(self, name: str, end: str, without: Sequence[str] = ()) -> str:
        """Returns the expression for any text up to and with `end`. None of the texts in `without` is in it."""
        if self.control_id(end) is not None:
            # The token's text may not be spelled before it, since both would look the same in the answer.
            return f"{self.text_without(_ANYTHING, [end, *without])} {self.text(end)}"
        once = f"/(.|\\n)*{_escaped(end)}/ & ~/(.|\\n)*{_escaped(end)}(.|\\n)+/"
        return self.rule(name, self.text_without(once, without))

    def text_without(self, expression: str, without: Sequence[str]) -> str:
        """Adds a terminal for texts that have none of the given ones in them, and returns its name."""
        name = f"TEXT_{len(self.rules)}"
        excluded = f" & ~/(.|\\n)*({'|'.join(map(_escaped, without))})(.|\\n)*/" if without else ""
        return self.rule(name, expression + excluded)


def call_constraint(
    tools: Sequence[Tool],
    choice: ToolChoice,
    form: ToolFormat,
    reasoning: ReasoningFormat | None,
    control_id: Callable[[str], int | None],
    *,
    begins_in_reasoning: bool,
) -> Constraint | None:
    """Returns the constraint on an answer that may call functions; None if any answer is fine.

    Raises InvalidParameterError for schemas that are no objects, and UnsupportedError for what the form cannot force.
    """
    is_forced = choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED)
    callable_tools = [
        (index, tool)
        for index, tool in enumerate(tools)
        if choice.mode is not ToolMode.NAMED or tool.name == choice.name
    ]
    if not is_forced and not any(tool.is_strict for _, tool in callable_tools):
        return None
    if not is_forced and (not form.begin or control_id(form.begin) is None):
        raise UnsupportedError("this model does not mark its calls by a token; for strict functions, require a call")
    grammar = _Grammar(control_id)
    calls = _calls(grammar, form, callable_tools, is_single=choice.is_single or choice.mode is ToolMode.NAMED)
    answer = calls if is_forced else f"({_text_of_answer(grammar, form)})? ({calls})?"
    grammar.rule("start", f"{_reasoning(grammar, reasoning, begins_in_reasoning)} {answer}")
    return Constraint(
        ConstraintKind.TOOL_CALLS,
        json.dumps(
            {
                "grammar": "\n".join(reversed(grammar.rules)),
                "schemas": grammar.schemas,
                "control_token_ids": grammar.control_ids,
            }
        ),
    )


def _text_of_answer(grammar: _Grammar, form: ToolFormat) -> str:
    """Returns the expression for the text before calls.

    It does not spell the mark of a call with other tokens: that would look like a call, with any arguments.
    """
    return grammar.text_without(_ANYTHING, [form.begin])


def _reasoning(grammar: _Grammar, reasoning: ReasoningFormat | None, begins_in_reasoning: bool) -> str:
    """Returns the expression for the reasoning before an answer."""
    if reasoning is None:
        return ""
    gap = grammar.rule("gap", r"/[ \n]{0,2}/")
    rest = f"{grammar.anything_before('reasoning', reasoning.end)} {gap}"
    return rest if begins_in_reasoning else f"({grammar.text(reasoning.begin)} {rest})?"


def _calls(grammar: _Grammar, form: ToolFormat, tools: Sequence[tuple[int, Tool]], *, is_single: bool) -> str:
    writer = _WRITERS.get(form.style)
    if writer is None:
        raise UnsupportedError(f"calls in this model's form ({form.name}) cannot be forced; use tool_choice auto")
    expressions = [writer(grammar, form, index, tool, _schema_of(index, tool)) for index, tool in tools]
    call = grammar.rule("call", " | ".join(expressions))
    if form.style in (CallStyle.JSON_LIST, CallStyle.PYTHON):
        more = "" if is_single else f' (", " {call})*'
        return f'{grammar.text(form.begin)} "[" {call}{more} "]"'
    return call if is_single else f"{call} ({grammar.text(form.between)} {call})*"


def _schema_of(index: int, tool: Tool) -> dict[str, Any]:
    """Returns the schema of a function's arguments."""
    schema: dict[str, Any] = json.loads(tool.parameters) if tool.parameters else dict(_NO_ARGUMENTS)
    if schema.setdefault("type", "object") != "object":
        raise InvalidParameterError(f"chat.tools[{index}].parameters", "must be the schema of an object")
    return schema


def _escaped(text: str) -> str:
    """Returns a regular expression for a text, as Lark's notation has it."""
    return "".join("\\n" if char == "\n" else re.escape(char).replace("/", "\\/") for char in text)


def _place(index: int, *keys: str) -> str:
    return ".".join([f"chat.tools[{index}].parameters", *keys])


def _json_call(grammar: _Grammar, form: ToolFormat, index: int, tool: Tool, schema: dict[str, Any]) -> str:
    head = json.dumps(f'{form.padding}{{"name": "{tool.name}", "{form.arguments_key}": ')
    begin = "" if form.style is CallStyle.JSON_LIST else grammar.text(form.begin)
    body = f"{head} {grammar.json(_place(index), schema)} {json.dumps('}' + form.padding)}"
    return f"{begin} {body} {grammar.text(form.end)}"


def _named_call(grammar: _Grammar, form: ToolFormat, index: int, tool: Tool, schema: dict[str, Any]) -> str:
    arguments = grammar.json(_place(index), schema)
    return f"{grammar.text(form.begin)} {json.dumps(tool.name)} {grammar.text(form.separator)} {arguments}"


def _python_call(grammar: _Grammar, form: ToolFormat, index: int, tool: Tool, schema: dict[str, Any]) -> str:
    required, optional = _arguments(index, schema, form)
    for name in (*tool.name.split("."), *(key for key, _ in required), *(key for key, _ in optional)):
        if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
            raise InvalidParameterError(f"chat.tools[{index}]", f"{name[:64]!r} is no name in {_IN_FORM} ({form.name})")
    written = {
        key: f"{json.dumps(key + '=')} {grammar.json(_place(index, 'properties', key), value)}"
        for key, value in [*required, *optional]
    }
    rest = [f'(", " {written[key]})?' for key, _ in optional]
    if required:
        body = ' ", " '.join(written[key] for key, _ in required)
        return f'"{tool.name}(" {body} {" ".join(rest)} ")"'
    # The first argument has no comma before it, whichever it is.
    beginnings = [f"{written[key]} {' '.join(rest[number + 1 :])}" for number, (key, _) in enumerate(optional)]
    arguments = " | ".join(beginnings)
    return f'"{tool.name}(" {f"({arguments})?" if arguments else ""} ")"'


def _tagged_call(grammar: _Grammar, form: ToolFormat, index: int, tool: Tool, schema: dict[str, Any]) -> str:
    required, optional = _arguments(index, schema, form)
    for key, _ in (*required, *optional):
        if not key or key != key.strip() or set(key) & _NO_NAME:
            raise InvalidParameterError(f"chat.tools[{index}]", f"{key[:64]!r} is no name in {_IN_FORM} ({form.name})")
    names, by_name = [key for key, _ in required], dict([*required, *optional])
    arguments = []
    for number, key in enumerate(schema.get("properties", {})):
        written = _tagged(grammar, form, index, f"{index}_{number}", key, by_name[key])
        arguments.append(written if key in names else f"({written})?")
    assert len(arguments) == len(required) + len(optional), "each argument is written once"
    head = f"{grammar.text(form.begin)} {json.dumps(form.name_begin + tool.name + form.name_end)}"
    tail = f"{grammar.text(form.arguments_end)} {grammar.text(form.end)}"
    return f"{head} {' '.join(arguments)} {tail}"


def _tagged(grammar: _Grammar, form: ToolFormat, index: int, number: str, key: str, schema: Any) -> str:
    """Returns the expression for one argument with its tags."""
    begin = f"{_tags(grammar, form.key_begin)} {json.dumps(key)} {_tags(grammar, form.key_end)}"
    if not isinstance(schema, dict) or schema.get("type") != "string":
        value = grammar.json(_place(index, "properties", key), schema)
        return f"{begin} {value} {_tags(grammar, form.value_end)}"
    if unknown := schema.keys() - _TEXT_KEYWORDS:
        raise InvalidParameterError(
            _place(index, "properties", key), f"{min(unknown)} is not supported for texts in this model's form of calls"
        )
    fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if fixed is None:
        end = form.value_end.strip()
        before = form.value_end[: form.value_end.index(end)]
        after = form.value_end[len(before) + len(end) :]
        mark = end if grammar.control_id(end) is not None else before + end
        text = grammar.anything_before(f"text_{number}", mark, [form.end, form.key_begin])
        return f"{begin} {text} {grammar.text(after)}"
    marks = (form.end, form.key_begin, form.value_end.strip())
    if any(mark in value for mark in marks for value in fixed if isinstance(value, str)):
        raise InvalidParameterError(_place(index, "properties", key), f"has a text with a tag of {_IN_FORM}")
    texts = " | ".join(json.dumps(value) for value in fixed if isinstance(value, str))
    if not texts:
        raise InvalidParameterError(_place(index, "properties", key), "allows no text")
    return f"{begin} ({texts}) {_tags(grammar, form.value_end)}"


def _tags(grammar: _Grammar, text: str) -> str:
    """Returns the expression for a text with tags, each of which may be a control token."""
    parts: list[str] = []
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if grammar.control_id(bare) is None:
            parts.append(json.dumps(line))
            continue
        before, _, after = line.partition(bare)
        parts += [grammar.text(before), grammar.text(bare), grammar.text(after)]
    return " ".join(filter(None, parts))


def _arguments(
    index: int, schema: dict[str, Any], form: ToolFormat
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Returns the required and the other arguments, by name. Raises InvalidParameterError for other keywords."""
    known = {"type", "properties", "required", "title", "description", "additionalProperties", "$schema", *_DEFINITIONS}
    if unknown := schema.keys() - known:
        raise InvalidParameterError(
            _place(index), f"{min(unknown)} is not supported where this model's calls are forced ({form.name})"
        )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise InvalidParameterError(_place(index), "must have properties by name, and a list of required ones")
    if given := {key: schema[key] for key in _DEFINITIONS if key in schema}:
        # Each argument is a schema of its own, whose references lead to the same places.
        properties = {
            key: {**value, **given} if isinstance(value, dict) else value for key, value in properties.items()
        }
    if missing := [name for name in required if name not in properties]:
        raise InvalidParameterError(_place(index, "required"), f"{str(missing[0])[:64]!r} is none of the properties")
    return (
        [(key, value) for key, value in properties.items() if key in required],
        [(key, value) for key, value in properties.items() if key not in required],
    )


_WRITERS: Mapping[CallStyle, Callable[[_Grammar, ToolFormat, int, Tool, dict[str, Any]], str]] = {
    CallStyle.JSON: _json_call,
    CallStyle.JSON_LIST: _json_call,
    CallStyle.NAME_AND_JSON: _named_call,
    CallStyle.PYTHON: _python_call,
    CallStyle.TAGS: _tagged_call,
}
