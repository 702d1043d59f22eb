"""Checks JSON schemas before llguidance gets them, and refuses what it would ignore or write otherwise.

llguidance (1.9) ignores keywords that it does not know, such as misspelt ones, rounds numbers that a float cannot hold,
and takes options from the schema itself. An answer must conform to the schema as another program reads it, so all of
that is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Never

from decoder_svc.constraint.schema_patterns import exact_pattern

_SCHEMA = frozenset({"additionalProperties", "items", "additionalItems"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
# Their values are schemas by name.
_NAMED = frozenset({"properties", "$defs", "definitions"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_VALUES = frozenset({"const", "enum"})
_PLAIN = frozenset(
    {
        *("type", "required", "format", "$ref", "$id", "$schema", "$anchor"),
        *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    }
)
# Keywords that say something about a value and allow and forbid nothing. So do all that begin with x-.
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("contentEncoding", "contentMediaType", "contentSchema", "discriminator"),
    }
)
# Numbers that a float holds exactly as they are written.
_MAX_DIGITS = 15
_MAX_INTEGER = 2**53 - 1
_LEAST_FRACTION = 1e-9
_MAX_NUMBER_CHARS = 40


def parsed_schema(text: str) -> dict[str, Any]:
    """Returns a schema for llguidance. Raises ValueError with what is wrong or not supported, or RecursionError."""
    schema = json.loads(text, parse_constant=_no_constant, parse_int=_integer, parse_float=_fraction)
    if isinstance(schema, bool):
        # True allows everything, and false nothing.
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError("it must be a JSON object, true or false")
    checked: dict[str, Any] = _checked(schema)
    return checked


def _checked(schema: Any) -> Any:
    """Returns a schema with its patterns rewritten."""
    if not isinstance(schema, dict):
        return schema
    _check_counts(schema)
    return {key: _value(key, value) for key, value in schema.items()}


def _value(key: str, value: Any) -> Any:
    """Returns the value of a keyword, checked. Raises ValueError for a keyword that is not supported."""
    _check_text(key)
    rewritten = _rewriting(key)
    if rewritten is not None:
        return rewritten(value)
    if key in _BOUNDS or key in _VALUES:
        _check_values(value)
    elif key == "format" and value == "unknown":
        raise ValueError("Unknown format: unknown")
    elif key == "x-guidance" or not (key in _PLAIN or key in _ANNOTATIONS or key.startswith("x-")):
        raise ValueError(f'Unimplemented keys: ["{key}"]')
    return value


def _rewriting(key: str) -> Callable[[Any], Any] | None:
    """Returns the function for a keyword whose value has schemas or patterns; None for all others."""
    if key in _SCHEMA:
        return _checked
    if key in _SCHEMAS:
        return lambda schemas: [_checked(each) for each in schemas] if isinstance(schemas, list) else schemas
    if key in _NAMED:
        return lambda schemas: _by_name(schemas, _named)
    if key == "patternProperties":
        return lambda schemas: _by_name(schemas, exact_pattern)
    if key == "pattern":
        return lambda pattern: exact_pattern(pattern) if isinstance(pattern, str) else pattern
    return None


def _by_name(schemas: Any, name: Callable[[str], str]) -> Any:
    if not isinstance(schemas, dict):
        return schemas
    return {name(key): _checked(each) for key, each in schemas.items()}


def _named(name: str) -> str:
    _check_text(name)
    return name


def _check_counts(schema: dict[str, Any]) -> None:
    """Refuses a number of properties that an answer could reach by writing one name twice."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len(set(map(str, required))):
        raise ValueError("minProperties above the number of required properties is not supported")


def _check_values(value: Any) -> None:
    """Refuses numbers and texts that an answer could not have exactly."""
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict):
        for name, each in value.items():
            _check_text(name)
            _check_values(each)
    elif isinstance(value, list):
        for each in value:
            _check_values(each)


def _check_text(text: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("a text has half of a surrogate pair")


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_NUMBER_CHARS or abs(number := int(digits)) > _MAX_INTEGER:
        raise ValueError(f"the number {digits[:_MAX_NUMBER_CHARS]} is beyond 2^53 - 1, which is not supported")
    return number


def _fraction(text: str) -> float:
    number = float(text) if len(text) <= _MAX_NUMBER_CHARS else math.inf
    is_fine = number == 0 or _LEAST_FRACTION <= abs(number) <= _MAX_INTEGER
    digits = text.lower().partition("e")[0].lstrip("-").replace(".", "").strip("0")
    if not is_fine or len(digits) > _MAX_DIGITS:
        raise ValueError(f"the number {text[:_MAX_NUMBER_CHARS]} has more digits than an answer could have")
    return number
