"""Checks JSON schemas before llguidance gets them, and refuses what it would ignore or write otherwise.

llguidance (1.9) ignores keywords that it does not know, such as misspelt ones, rounds numbers that a float cannot hold,
leaves out control characters of texts, and takes options from the schema itself. An answer must conform to the schema
as another program reads it, so all of that is refused by name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Never

from decoder_svc.constraint.schema.keywords import COUNTS, check_keyword, is_number
from decoder_svc.constraint.schema.patterns import exact_pattern
from decoder_svc.constraint.schema.references import check_references

_SCHEMA = frozenset({"additionalProperties", "items", "additionalItems"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
# Their values are schemas by name.
_NAMED = frozenset({"properties", "$defs", "definitions"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_VALUES = frozenset({"const", "enum"})
_PLAIN = frozenset(
    {
        *("type", "required", "format", "$ref", "$id", "$schema", "$anchor"),
        *COUNTS,
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
# Keywords with values that allow everything. Some programs write them.
_WITHOUT_EFFECT: Mapping[str, object] = {
    "uniqueItems": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "not": False,
}
# Distance of an exclusive bound from the inclusive one that replaces it; floats have it up to the second number.
_STEP = 1e-9
_MAX_STEPPED = 1e5
# Control characters that an answer has as `\n` and the like. The others would be numbers, which it never has.
_ESCAPED = frozenset("\b\f\n\r\t")
_MAX_NUMBER_CHARS = 40


def parsed_schema(text: str) -> dict[str, Any]:
    """Returns a schema for llguidance. Raises ValueError with what is wrong or not supported, or RecursionError."""
    schema = json.loads(
        text, parse_constant=_no_constant, parse_int=_integer, parse_float=_fraction, object_pairs_hook=_object
    )
    if schema is False:
        raise ValueError("the schema false allows nothing")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("it must be a JSON object, true or false")
    check_references(schema)
    checked: dict[str, Any] = _checked(schema)
    return checked


def subschemas(schema: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the schemas directly in a schema, each with the names that lead to it."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _SCHEMA:
            yield (key,), value
        elif key in _SCHEMAS and isinstance(value, list):
            yield from (((key, str(index)), each) for index, each in enumerate(value))
        elif (key in _NAMED or key == "patternProperties") and isinstance(value, dict):
            yield from (((key, name), each) for name, each in value.items())


def _checked(schema: Any) -> Any:
    """Returns a schema with its patterns and some bounds rewritten, and without keywords that have no effect."""
    if not isinstance(schema, dict):
        return schema
    _check_counts(schema)
    effective = {
        key: value for key, value in schema.items() if key not in _WITHOUT_EFFECT or value is not _WITHOUT_EFFECT[key]
    }
    for key, value in effective.items():
        check_keyword(key, value)
    return _inclusive({key: _value(key, value) for key, value in _with_prefix_items(effective).items()})


def _with_prefix_items(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema of lists in the words of 2020-12, whose `items` is about the items behind `prefixItems`.

    Before, `items` could be the list, and `additionalItems` was about the items behind it. llguidance (1.9) drops
    `prefixItems` beside one of these.
    """
    items, others = schema.get("items"), schema.get("additionalItems")
    if "prefixItems" in schema and (isinstance(items, list) or others is not None):
        raise ValueError("prefixItems beside additionalItems or a list of items is not supported; use items")
    found = {key: value for key, value in schema.items() if key != "additionalItems"}
    if isinstance(items, list):
        found["prefixItems"] = items
        del found["items"]
        if others is not None:
            found["items"] = others
    return found


def _inclusive(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema of numbers whose exclusive bounds hold.

    llguidance (1.9) allows the bound itself if it is whole and the other bound has the same whole part, as in 0 < x <=
    0.5. Such a bound is replaced by an inclusive one close to it.
    """
    lowest, highest = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = [schema.get(key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")]
    numbers = [bound for bound in bounds if is_number(bound)]
    found = dict(schema)
    for key, bound, inclusive, step in (
        ("exclusiveMinimum", lowest, "minimum", _STEP),
        ("exclusiveMaximum", highest, "maximum", -_STEP),
    ):
        if not is_number(bound) or bound != int(bound) or schema.get("type") == "integer":
            continue
        if not any(number != bound and abs(number - bound) <= 1 for number in numbers):
            continue
        if abs(bound) > _MAX_STEPPED or inclusive in schema or "multipleOf" in schema:
            raise ValueError(f"{key} {bound} with another bound within 1 of it is not supported")
        del found[key]
        found[inclusive] = bound + step
    return found


def _value(key: str, value: Any) -> Any:
    """Returns the value of a keyword, checked. Raises ValueError for a keyword that is not supported."""
    _check_text(key)
    rewritten = _rewriting(key)
    if rewritten is not None:
        return rewritten(value)
    if key == "multipleOf" and is_number(value) and value <= 0:
        raise ValueError(f"multipleOf must be above 0, got {value}")
    if key in COUNTS:
        # A count may be written as 1.0.
        return int(value)
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
        return lambda schemas: [_checked(each) for each in schemas]
    if key in _NAMED:
        return lambda schemas: _by_name(schemas, _named)
    if key == "patternProperties":
        return lambda schemas: _by_name(schemas, exact_pattern)
    if key == "pattern":
        return exact_pattern
    return None


def _by_name(schemas: dict[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
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
    for char in text:
        if "\ud800" <= char <= "\udfff":
            raise ValueError("a text has half of a surrogate pair")
        if (char < " " and char not in _ESCAPED) or char == "\x7f":
            raise ValueError(f"a text has the control character U+{ord(char):04X}, which is not supported")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the name {json.dumps(twice[:_MAX_NUMBER_CHARS])} twice")
    return found


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
