"""Finds the part of a JSON schema for which the whole schema is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from decoder_svc.constraint.schema.json_schema import subschemas

# Processor time, which is taken from what a check may use.
_MAX_S = 0.2


def place_of(schema: Any, reason: str, reason_of: Callable[[Any], str | None]) -> str:
    """Returns the JSON pointer (RFC 6901) of the innermost part that is refused for the same reason.

    `reason_of` says why a schema is refused, or None. The result is "" if only the whole schema is refused so, as where
    parts refer to each other, or if there is no time to find out.
    """
    end_s = time.thread_time() + _MAX_S
    pointer, is_found = "", True
    while is_found and time.thread_time() < end_s:
        is_found = False
        for names, part in subschemas(schema):
            if time.thread_time() >= end_s:
                break
            if reason_of(part) == reason:
                pointer += "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in names)
                schema, is_found = part, True
                break
    return pointer
