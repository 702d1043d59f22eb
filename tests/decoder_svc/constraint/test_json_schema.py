"""Tests that JSON schemas mean what they mean to other programs, or are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decoder_svc.constraint.grammars import Grammars, RefusedConstraintError
from decoder_svc.constraint.json_schema import parsed_schema
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from tests.decoder_svc.constraint.demo_constraints import demo_grammars

OBJECT = {"type": "object"}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


def takes(grammars: Grammars, schema: Any, text: str) -> bool:
    """Whether a text is an answer to a schema, byte by byte."""
    written = schema if isinstance(schema, str) else json.dumps(schema)
    matcher = grammars.matcher(Constraint(ConstraintKind.JSON_SCHEMA, written))
    ids = [token_id for byte in text.encode() for token_id in grammars.tokenizer.tokenize_bytes(bytes([byte]))]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "answers", "others"),
    [
        (True, ["1", "null", '{"a": [1, "x"]}'], ["", "x"]),
        ({"type": "integer"}, ["0", "-7"], ["01", "1.0", "1e2", "-", '"1"']),
        ({"type": "integer", "minimum": -3, "maximum": 5}, ["-3", "0", "5"], ["-4", "6"]),
        ({"type": "integer", "maximum": 5, "exclusiveMaximum": True, "minimum": 4}, ["4"], ["5", "3"]),
        ({"type": "number", "exclusiveMinimum": 1}, ["1.01", "2"], ["1", "1.0", "1.000", "0.9"]),
        ({"type": "number", "minimum": 0}, ["0", "0.5", "17"], ["-0.5", "-1"]),
        ({"type": "number", "multipleOf": 2}, ["4", "0"], ["3", "4.5"]),
        ({"const": -9007199254740991}, ["-9007199254740991"], ["-9007199254740992"]),
        ({"const": 0.1}, ["0.1"], ["0.10000000000000001", "0.2"]),
        ({"type": "string", "minLength": 2, "maxLength": 2}, ['"ab"', '"éa"'], ['"a"', '"abc"']),
        ({"type": "string", "pattern": "^a"}, ['"a"', '"ab"'], ['"ba"', '""']),
        ({"type": "string", "pattern": "^(a|b)|c$"}, ['"xc"', '"ax"'], ['"xbx"']),
        ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"256.1.1.1"', '"1.2.3"']),
        ({"type": ["string", "null"], "format": "date"}, ["null", '"2024-01-31"'], ['"2024-13-01"', '"x"']),
        ({"enum": [1, "a", None]}, ["1", '"a"', "null"], ["2", "a", '"b"']),
        (
            {**OBJECT, "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False},
            ['{"a": 1}'],
            ["{}", '{"a": 2}', '{"b": 1}', '{"a": 1, "b": 2}', '{"a":1}', '{"a": 1 }'],
        ),
        # No name can be written in a second way, and an answer has the properties in the order of the schema.
        (
            {**OBJECT, "properties": {"a": {"enum": [1]}}, "additionalProperties": {"enum": ["z"]}},
            ['{"a": 1, "b": "z"}', '{"b": "z"}'],
            ['{"a": "z"}', '{"\\u0061": "z"}', '{"b": "z", "a": 1}', '{"a": 1, "a": "z"}'],
        ),
        ({**OBJECT, "properties": {'a"b\\': {"enum": [1]}}, "required": ['a"b\\']}, ['{"a\\"b\\\\": 1}'], ["{}"]),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, ["[true]"], ["[]", "[1]"]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[1]", "[]"], ["[2]", "[1, 1]"]),
        (
            {"$defs": {"t": {"enum": [7]}}, **OBJECT, "properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["a"],
             "additionalProperties": False},
            ['{"a": 7}'],
            ['{"a": 8}'],
        ),
        ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 3}]}, ["2", "3"], ["1", "4"]),
        # These keywords say something about a value and restrict nothing.
        ({"title": "t", "description": "d", "default": 1, "x-mine": {"any": 1}, "type": "null"}, ["null"], ["1"]),
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_is_what_the_schema_says(
    grammars: Grammars, schema: Any, answers: list[str], others: list[str]
) -> None:
    assert [text for text in answers if not takes(grammars, schema, text)] == []
    assert [text for text in others if takes(grammars, schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        # A misspelt keyword would be ignored, and every answer be right.
        ({"type": "object", "propertys": {}}, '["propertys"]'),
        ({"$defs": {"a": {"not": {}}}, "enum": [1]}, '["not"]'),
        ({"type": "array", "items": {"uniqueItems": True}}, '["uniqueItems"]'),
        ({"anyOf": [{"type": "null"}, {"if": {}}]}, '["if"]'),
        ({"x-guidance": {"whitespace_flexible": True}}, '["x-guidance"]'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        # Numbers that would be written otherwise.
        ('{"const": 9007199254740993}', "beyond 2^53 - 1"),
        ('{"const": 1e22}', "more digits"),
        ('{"const": 0.30000000000000004}', "more digits"),
        ('{"type": "number", "maximum": 1e-300}', "more digits"),
        ('{"const": NaN}', "NaN is no JSON"),
        ('{"maximum": Infinity}', "Infinity is no JSON"),
        ('{"const": "\\ud800"}', "surrogate"),
        ('{"properties": {"\\udc00": {}}}', "surrogate"),
        # One name twice would count as two.
        ({**OBJECT, "minProperties": 2}, "minProperties"),
        ({**OBJECT, "minProperties": 2, "required": ["a", "a"]}, "minProperties"),
        ("[1]", "must be a JSON object, true or false"),
        ("7", "must be a JSON object, true or false"),
        (False, ""),
    ],
    ids=str,
)
def test_what_an_answer_could_not_conform_to_is_refused_by_name(grammars: Grammars, schema: Any, reason: str) -> None:
    written = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(RefusedConstraintError) as caught:
        grammars.check(Constraint(ConstraintKind.JSON_SCHEMA, written))
    assert reason in str(caught.value)


def test_values_are_left_as_they_are() -> None:
    schema = {"const": {"pattern": "[^a]", "not": 1}, "enum": [["not"]], "required": ["not"], "default": {"if": 1}}
    assert parsed_schema(json.dumps(schema)) == schema
