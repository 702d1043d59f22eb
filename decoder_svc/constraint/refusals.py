"""Says why a constraint is refused, in words about the constraint: llguidance's own are partly about its inside."""

from __future__ import annotations

import re

_MAX_REASON_CHARS = 300
# Reasons that are about llguidance's own options and parts, by what is in them.
_REASONS = {
    "NoExtensionBias": "it allows no text",
    "Regex is empty": "it allows no text",
    "coerce_one_of": "oneOf whose schemas may allow the same value is not supported; use anyOf",
    "Too many items": "it is too complex, or a recursion has no end",
    "Current row has": "it is too complex, or a recursion has no end",
    "fuel exhausted": "it is too complex",
    "not disjoint": "patternProperties whose expressions may match the same name are not supported",
}
_NO_RESOURCE = re.compile(r"Resource '(.*)' is not present in a registry")
# A place in a grammar, its line and column, and the lines that are quoted behind the reason.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_QUOTED_LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
# An expression and marks below the wrong characters, four characters from the left.
_EXPRESSION = re.compile(
    r'(?:invalid regex "[^\n]*" \(in regex\): )?regex parse error:\n.*\n    ( *)\^+[^\n]*\n', re.DOTALL
)
# llguidance quotes the wrong text once more behind the reason.
_FOUND = re.compile(r' \(at "[^\n]*" \([^\n]*\)\)')
_SCHEMA_PLACE = re.compile(r"while processing json-schema:///#?(\S*?):? ")


class RefusedConstraintError(Exception):
    """A constraint that cannot be followed. Its text is the reason, in one line."""


def refused(reason: str, *, is_expression: bool = False) -> RefusedConstraintError:
    """Returns the error for a reason of llguidance.

    `is_expression`: the constraint is a regular expression. llguidance makes a grammar of one line of it.
    """
    reason = _QUOTED_LINES.sub("", reason.replace("<non-verbose/>", ""))
    place = _PLACE.match(reason)
    said = reason[place.end() :] if place else reason
    where = f" (line {place[1]}, column {place[2]})" if place and not is_expression else ""
    if expression := _EXPRESSION.search(said):
        said = said[: expression.start()] + said[expression.end() :].removeprefix("error: ")
        where += f" at character {len(expression[1]) + 1} of the expression"
    shown = " ".join(_FOUND.sub("", _SCHEMA_PLACE.sub("", said)).split())
    # The rest lists names that only llguidance knows.
    shown = shown.partition("; following special tokens")[0]
    if resource := _NO_RESOURCE.search(shown):
        shown = f"the reference {resource[1]!r} leads to another document, which is not supported"
    for known, meant in _REASONS.items():
        if known in shown:
            shown = meant
    shown += where
    if len(shown) > _MAX_REASON_CHARS:
        shown = f"{shown[:_MAX_REASON_CHARS]}…"
    return RefusedConstraintError(f"cannot be served: {shown}")
