"""Finds the fields of config.json that a module of transformers reads, by the text of its class."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from lookonce.model.number_ranges import is_numeric

# A field, which may be that of a part of a whole configuration.
_FIELD = re.compile(r"\bconfig\.((?:\w+_config\.)?\w+)|\bgetattr\((?:self\.)?config, \"(\w+)\"")
_COPIED = re.compile(r"^\s*self\.(\w+) = (?:self\.)?config\.(\w+)$", re.MULTILINE)


def source_of(item: Any) -> str:
    """Returns the text of a class or of a function's code, empty if it is unknown."""
    try:
        return inspect.getsource(item)
    except (OSError, TypeError):
        return ""


def copied_fields(source: str) -> dict[str, str]:
    """Returns the attributes of a class that are copies of fields, with the names of the fields."""
    return dict(_COPIED.findall(source))


def read_fields(config: Any, source: str) -> dict[str, Any]:
    """Returns the fields that a text of Python reads, with their values: numbers, and what stands in their place.

    Of a field with entries, such as that of rotary positions, only entries that are null or a text are returned.
    """
    found: dict[str, Any] = {}
    for match in _FIELD.finditer(source):
        path = match[1] or match[2]
        outer, _, name = path.rpartition(".")
        part = getattr(config, outer, None) if outer else config
        own = own_name(part, name)
        path, name = path.removesuffix(name) + own, own
        value = getattr(part, name, None)
        if isinstance(value, Mapping):
            found |= {f"{path}.{each}": value for each, value in _not_numbers(value).items()}
        elif is_shown(part, name):
            found[path] = value
    return found


def own_name(config: Any, field: str) -> str:
    """Returns the name that a field has in config.json, where classes of models may use another one."""
    return str(getattr(config, "attribute_map", {}).get(field, field))


def is_number(value: Any) -> bool:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_shown(config: Any, field: str) -> bool:
    """Whether a field is a number, or has one as its default."""
    value = getattr(config, field, config)
    is_wrong = (value is None or isinstance(value, str)) and is_number(getattr(type(config), field, None))
    return is_number(value) or is_wrong


def listed(fields: Mapping[str, Any]) -> str:
    """Returns fields and values for a message."""
    return ", ".join(f"{name} = {'null' if value is None else value}" for name, value in fields.items())


def part_name(whole: Any, config: Any) -> str:
    """Returns the name, with a dot, of the part of config.json that `config` is; empty for the whole or if unknown."""
    names = [name for name in getattr(whole, "sub_configs", ()) if getattr(whole, name, None) is config]
    return f"{names[0]}." if names else ""


def _not_numbers(entries: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{each}": inner for each, inner in _not_numbers(value).items()}
        elif isinstance(value, str | None) and is_numeric(name):
            found[name] = value
    return found
