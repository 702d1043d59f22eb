"""Finds objects whose `patternProperties` allow no name beside those of `properties`.

llguidance (1.9) lets an answer begin another property of such an object, and then nothing can follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from decoder_svc.constraint.schema.json_schema import subschemas

_ANY_VALUE = {"const": 0}


def name_trials(schema: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields (pattern, trial, beginning) for each object of a schema that may be such a one.

    The trial is a schema with the object's names and one value for all. If its answer can go on behind the beginning,
    the object has further names. Both schemas are in llguidance's words.
    """
    open_schemas = [schema]
    while open_schemas:
        one = open_schemas.pop()
        open_schemas.extend(part for _, part in subschemas(one))
        if not isinstance(one, dict) or one.get("additionalProperties") is not False:
            continue
        declared, patterns = one.get("properties"), one.get("patternProperties")
        if not declared or not patterns:
            continue
        names = list(declared)
        trial = {
            "type": "object",
            "properties": dict.fromkeys(names, _ANY_VALUE),
            "required": names,
            "patternProperties": dict.fromkeys(patterns, _ANY_VALUE),
            "additionalProperties": False,
        }
        members = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: 0" for name in names)
        yield next(iter(patterns)), trial, f'{{{members}, "'
