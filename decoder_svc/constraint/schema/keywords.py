"""Checks what the keywords of a JSON schema say, whatever its type. llguidance (1.9) reads only those of the type."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

# Keywords whose values are whole numbers from 0 on.
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")
_DIALECT = re.compile(r"https?://json-schema\.org/(?:draft-0[467]/|draft/20(?:19-09|20-12)/)?schema#?")
_MAX_SHOWN_CHARS = 60


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_keyword(key: str, value: Any) -> None:
    """Raises ValueError if a keyword cannot have this value. Values of unknown keywords are right."""
    if key not in _KINDS:
        return
    kind, is_right = _KINDS[key]
    if not is_right(value):
        shown = json.dumps(value)
        shown = shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}…"
        raise ValueError(f"{key} must be {kind}, got {shown}")
    if key == "$schema" and not _DIALECT.fullmatch(value):
        raise ValueError(f"$schema {value[:_MAX_SHOWN_CHARS]!r} is not supported; draft-04 to 2020-12 are")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_some_schemas(value: Any) -> bool:
    return bool(value) and _are_schemas(value)


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_type(value: Any) -> bool:
    return all(each in _TYPES for each in value) and bool(value) if isinstance(value, list) else value in _TYPES


_TEXT = ("a text", _is_text)
_COUNT = ("a whole number from 0 on", _is_count)
_NUMBER = ("a number", is_number)
_EXCLUSIVE = ("a number, or true or false", lambda value: isinstance(value, bool) or is_number(value))
_NAMED = ("an object of schemas", _are_named_schemas)
_SOME = ("a list of schemas that is not empty", _are_some_schemas)
# The values that each keyword may have, in words and as a check.
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"one of {', '.join(_TYPES)}, or a list of them", _is_type),
    "enum": ("a list of values that is not empty", lambda value: isinstance(value, list) and bool(value)),
    **dict.fromkeys(("$ref", "$id", "$schema", "$anchor", "format", "pattern"), _TEXT),
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _EXCLUSIVE),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _NAMED),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _SOME),
    **dict.fromkeys(("additionalProperties", "additionalItems"), ("a schema", _is_schema)),
    "items": ("a schema, or a list of schemas", lambda value: _is_schema(value) or _are_schemas(value)),
    "prefixItems": ("a list of schemas", _are_schemas),
    "required": ("a list of names", _are_names),
}
