"""Finds references in a JSON schema that lead back to themselves, so that what they ask for never comes."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from typing import Any

# Keywords whose schemas are about the value itself, not about a part of it.
_OF_THE_SAME_VALUE = ("allOf", "anyOf", "oneOf")


def check_references(schema: Any) -> None:
    """Raises ValueError with the name of a reference from which references alone lead back to it (JSON Schema 9.4.1).

    llguidance (1.9) takes such a reference where the value may be missing, and the answer that begins one cannot go on.
    """
    # Schemas by identity, with those that are still to be followed.
    entered: dict[int, Iterator[dict[str, Any]]] = {}
    done: set[int] = set()
    for start in _all_schemas(schema):
        path = [start]
        while path:
            here = id(path[-1])
            if here not in entered:
                entered[here] = _next_of(path[-1], schema)
            target = next(entered[here], None)
            if target is None:
                done.add(here)
                path.pop()
            elif id(target) not in done:
                path.append(target)
                if id(target) in entered:
                    # Only a reference can have led back.
                    *_, reference = (one["$ref"] for one in path[:-1] if "$ref" in one)
                    raise ValueError(f"the reference {reference!r} leads back to itself")


def _all_schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Yields every object in a schema: those that are no schemas have no references."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, dict):
            yield one
            open_values.extend(one.values())
        elif isinstance(one, list):
            open_values.extend(one)


def _next_of(schema: dict[str, Any], root: Any) -> Iterator[dict[str, Any]]:
    """Yields the schemas that say something about the same value."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and isinstance(target := _target(reference, root), dict):
        yield target
    for key in _OF_THE_SAME_VALUE:
        members = schema.get(key)
        for member in members if isinstance(members, list) else ():
            if isinstance(member, dict):
                yield member


def _target(reference: str, root: Any) -> Any:
    """Returns what a reference into the schema leads to; None for any other reference."""
    if not reference.startswith("#"):
        return None
    found = root
    for written in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        name = written.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found if reference == "#" or reference.startswith("#/") else None
