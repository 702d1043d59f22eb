"""Tests that refusals are in words about the constraint."""

from __future__ import annotations

import pytest

from decoder_svc.constraint.refusals import refused

_EXPRESSION = 'at 1(8): invalid regex "ab\\\\q" (in regex): regex parse error:\n    ab\\q\n      ^^\nerror: no escape\n'


@pytest.mark.parametrize(
    ("reason", "is_expression", "meant"),
    [
        (_EXPRESSION + "   1 | start: /ab\\q/\n", True, "no escape at character 3 of the expression"),
        (_EXPRESSION.replace("1(8)", "2(5)"), False, "no escape (line 2, column 5) at character 3 of the expression"),
        ("regex parse error:\n    [\n    ^\nerror: unclosed", False, "unclosed at character 1 of the expression"),
        ("1(7): Expected token ':', found 'x' (at \"x\" ('x'))\n   1 | start x\n", False, "Expected token ':'"),
        ("while processing json-schema:///#/$defs/p: Unknown format: x", False, "Unknown format: x"),
        ("Unsatisfiable schema: Regex is empty: (And (Regex /a/) (Regex /b/))", False, "it allows no text"),
        ("Parser Error: Current row has 4799 items; max is 2000", False, "it is too complex, or"),
        ("fuel exhausted when checking relevance of lexemes (1000000)", False, "it is too complex"),
        ("Resource 'http://a/b' is not present in a registry and retrieving it", False, "the reference 'http://a/b'"),
        ("unknown name; following special tokens: <a>, <b>", False, "unknown name"),
        ("x" * 999, False, "x" * 300 + "…"),
    ],
)  # fmt: skip
def test_the_reason_says_nothing_of_the_library(reason: str, is_expression: bool, meant: str) -> None:
    shown = str(refused(reason, is_expression=is_expression))
    assert shown.startswith(f"cannot be served: {meant}")
    assert "\n" not in shown
    assert "1 | " not in shown
