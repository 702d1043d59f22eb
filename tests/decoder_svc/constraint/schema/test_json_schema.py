"""Tests that JSON schemas mean what they mean to other programs, or are refused by name."""

from __future__ import annotations

import decimal
import itertools
import json
import math
from typing import Any

import pytest

from decoder_svc.constraint.grammars import Grammars
from decoder_svc.constraint.refusals import RefusedConstraintError
from decoder_svc.constraint.schema.json_schema import parsed_schema
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
        # Until 2019-09, a list of items had the places that prefixItems has.
        (
            {"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},
            ["[1]", "[]", "[1, 2, 2]"],
            ["[2]", "[1, 1]"],
        ),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, ["[1]", "[]"], ["[2]", "[1, 1]"]),
        ({"type": "array", "items": {"const": 1}, "additionalItems": False}, ["[1, 1]"], ["[2]"]),
        ({"type": "array", "minItems": 1.0, "maxItems": 1, "items": {"const": 1}}, ["[1]"], ["[]", "[1, 1]"]),
        (
            {**OBJECT, "properties": {"ab": {"const": 1}}, "patternProperties": {"^a": {"enum": [1, 2]}},
             "additionalProperties": False},
            ['{"ab": 1, "a": 2}', '{"a": 2}', "{}"],
            ['{"ab": 2}', '{"b": 1}'],
        ),
        # A reference may lead back through a part of the value.
        (
            {**OBJECT, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"const": 1}]}}, "required": ["a"],
             "additionalProperties": False},
            ['{"a": 1}', '{"a": {"a": 1}}'],
            ['{"a": 2}', "{}"],
        ),
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
        # Characters that would be left out.
        ({"const": "a\x01b"}, "control character U+0001"),
        ({"enum": ["ok", {"a": ["\x7f"]}]}, "control character U+007F"),
        ({"properties": {"a\x00": {}}}, "control character U+0000"),
        ({"exclusiveMinimum": 1e6, "maximum": 1000000.5}, "exclusiveMinimum 1000000.0 with another bound within 1"),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.1}, "exclusiveMinimum 0 with another bound"),
        ('{"properties": {"\\udc00": {}}}', "surrogate"),
        # One name twice would count as two.
        ({**OBJECT, "minProperties": 2}, "minProperties"),
        ({**OBJECT, "minProperties": 2, "required": ["a", "a"]}, "minProperties"),
        # Values that would be ignored where the type has no use for the keyword.
        ({"type": "string", "required": True}, "required must be a list of names, got true"),
        ({"type": "string", "minimum": "x"}, 'minimum must be a number, got "x"'),
        ({"type": "integer", "items": 5}, "items must be a schema, or a list of schemas, got 5"),
        ({"type": "null", "minLength": -1}, "minLength must be a whole number from 0 on, got -1"),
        ({"type": "null", "maxItems": 1.5}, "maxItems must be a whole number from 0 on, got 1.5"),
        ({"type": ["null", "any"]}, "type must be one of null, boolean"),
        ({"properties": {"a": 5}}, 'properties must be an object of schemas, got {"a": 5}'),
        ({"type": "null", "enum": []}, "enum must be a list of values that is not empty, got []"),
        ({"anyOf": []}, "anyOf must be a list of schemas that is not empty, got []"),
        ({"type": "null", "$schema": "http://json-schema.org/draft-03/schema#"}, "draft-03/schema#' is not supported"),
        # Two ways to say what stands in a list, of which one would be dropped.
        ({"prefixItems": [{"const": 1}], "additionalItems": False}, "prefixItems beside additionalItems"),
        ({"prefixItems": [{"const": 1}], "items": [{"const": 2}]}, "prefixItems beside additionalItems or a list"),
        ({"items": [{"type": "null", "colour": 1}]}, '["colour"]'),
        # An answer that begins such a value could not go on.
        (
            {"prefixItems": [{"const": 1}, {"$ref": "#/$defs/q"}], "$defs": {"q": {"$ref": "#/$defs/q"}}},
            "the reference '#/$defs/q' leads back to itself",
        ),
        (
            {
                "properties": {"b": {"$ref": "#/$defs/a~1b"}},
                "$defs": {"a/b": {"anyOf": [{"allOf": [{"$ref": "#/properties/b"}]}]}},
            },
            "the reference '#/$defs/a~1b' leads back to itself",
        ),
        (
            {
                **OBJECT,
                "properties": {"a": {}, "b": {}},
                "patternProperties": {"^[ab]$": {}},
                "additionalProperties": False,
            },
            "patternProperties '^[ab]$' beside properties allows no further name",
        ),
        ({"type": "string", "pattern": r"^\x{61}$"}, r"has \x{, which is not supported"),
        ("[1]", "must be a JSON object, true or false"),
        ("7", "must be a JSON object, true or false"),
        (False, "the schema false allows nothing"),
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


def test_keywords_without_effect_are_served() -> None:
    schema = {"type": "array", "uniqueItems": False, "not": False, "unevaluatedItems": True}
    assert parsed_schema(json.dumps(schema)) == {"type": "array"}


POINTS = [-10.5, -10, -2.5, -2, -1, -0.5, -0.001, 0, 0.001, 0.5, 1, 1.000001, 1.05, 2, 9.5, 10, 10.5, 99.99, 100, 99999]
NUMBERS = [*(json.dumps(point) for point in POINTS), "-0", "0.0", "-0.0", "1.0", "2.00", "-2.0", "10.0", "0.3", "-0.3"]


@pytest.mark.parametrize("type_", ["number", ["number", "null"], ["integer", "null"], "integer"], ids=str)
@pytest.mark.parametrize("upper", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("lower", ["minimum", "exclusiveMinimum"])
def test_bounds_hold_exactly(grammars: Grammars, type_: Any, lower: str, upper: str) -> None:
    """llguidance 1.9 took 0 for 0 < x <= 0.5."""
    wrong: list[tuple[Any, str]] = []
    for low, high in itertools.combinations(POINTS, 2):
        schema = {"type": type_, lower: low, upper: high}
        if type_ == "integer" and not any(
            low < number < high for number in range(math.ceil(low), math.floor(high) + 1)
        ):
            # Served if a bound is whole and allowed; else there is no such number.
            continue
        for text in NUMBERS:
            number = decimal.Decimal(text)
            is_inside = decimal.Decimal(str(low)) <= number <= decimal.Decimal(str(high))
            is_on_bound = (lower.startswith("e") and number == low) or (upper.startswith("e") and number == high)
            if takes(grammars, schema, text) and (not is_inside or is_on_bound):
                wrong.append((schema, text))
    assert wrong == []


@pytest.mark.parametrize(("bounds", "text"), [
    ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5"),
    ({"exclusiveMinimum": 0, "maximum": 1}, "0.001"),
    ({"minimum": -2.5, "exclusiveMaximum": -2}, "-2.001"),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5"),
])  # fmt: skip
def test_numbers_close_to_an_exclusive_bound_are_allowed(grammars: Grammars, bounds: Any, text: str) -> None:
    assert takes(grammars, {"type": "number", **bounds}, text)
