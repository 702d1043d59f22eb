"""Tests that patterns of schemas mean for llguidance what they mean for JSON Schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from decoder_svc.constraint.grammars import Grammars
from decoder_svc.constraint.refusals import RefusedConstraintError
from decoder_svc.constraint.schema.json_schema import parsed_schema
from decoder_svc.constraint.schema.patterns import exact_pattern
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from tests.decoder_svc.constraint.demo_constraints import demo_grammars

# Each one alone and in pairs: what JSON escapes, what brackets give a meaning, and plain letters.
CHARS = [
    '"',
    "\\",
    "/",
    "\n",
    "\t",
    "\b",
    "\x01",
    "\x1f",
    "a",
    "b",
    "z",
    "[",
    "]",
    "&",
    "~",
    "-",
    "^",
    "é",
    "0",
    " ",
    ".",
    "😀",
]
PATTERNS = [
    *(r'^[^"a]$', r"^[^\\]$", r'^[^"\\/]{1,2}$', r"^[^\s]$", r"^[^a-y]$", r"^[^\]]$", r"^[^^]$", r"^[a^]$"),
    *(
        "^[[a]$",
        "^[a&&b]{1,2}$",
        "^[a~~b]$",
        "^[]a-]$".replace("[]", r"[\]"),
        r"^[\[\]]$",
        "^[.]$",
        "^.$",
        r"^\D$",
        r"^\W$",
    ),
    *(r'^(?:[^"]|\\")$', r"^[\n\t]$", r"^\\[^b]$", "^[^😀]$", "^[a-z-]$"),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


def takes(grammars: Grammars, schema: Any, value: str, escapes: bool) -> bool:
    """Whether the whole JSON text of a value is an answer, written with as few or as many escapes as may be."""
    matcher = grammars.matcher(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    tokenizer = grammars.tokenizer
    text = json.dumps(value, ensure_ascii=escapes)
    ids = (
        [token_id for byte in text.encode() for token_id in tokenizer.greedy_tokenize(chr(byte))]
        if text.isascii()
        else (tokenizer.tokenize_str(text))
    )
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_answer_is_taken_exactly_if_the_pattern_matches_its_value(grammars: Grammars, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    # Python reads a [ inside of brackets as JSON Schema does, but warns.
    expression = re.compile(pattern.replace("[[a]", r"[\[a]").replace("&&", r"\&\&").replace("~~", r"\~\~"), re.ASCII)
    wrong: list[str] = []
    for value in [*CHARS, *(one + other for one in CHARS for other in '"\\ab')]:
        if not expression.search(value) and takes(grammars, schema, value, escapes=False):
            wrong.append(value)
        # No answer has the control characters that JSON can only write as numbers.
        is_writable = value.isascii() and not {"\x01", "\x1f"} & set(value)
        if expression.search(value) and is_writable and not takes(grammars, schema, value, escapes=False):
            wrong.append(f"missing: {value}")
    assert wrong == []


def test_names_of_properties_are_patterns_too_and_data_is_not(grammars: Grammars) -> None:
    schema = {
        "patternProperties": {"^[^a]$": {"pattern": "[^b]"}},
        "properties": {"pattern": {"const": {"pattern": "[^c]"}}},
        "examples": [{"pattern": "[^d]"}],
        "anyOf": [{"pattern": "[^e]"}],
    }
    assert parsed_schema(json.dumps(schema)) == {
        "patternProperties": {r"^[^\x00a]$": {"pattern": r"[^\x00b]"}},
        "properties": {"pattern": {"const": {"pattern": "[^c]"}}},
        "examples": [{"pattern": "[^d]"}],
        "anyOf": [{"pattern": r"[^\x00e]"}],
    }


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"^[\x00-\x1f]$", "^\x00$", r"[\u0000-a]", "[a--b]", r"\0"),
        # Without the control character, the answer would be another one.
        *(r"^a\x01b$", "^a\x01b$", r"^a[\x1f]b$", r"a\u007f", "^\x7f*$", r"\v", r"\cA", r"\x{1}", r"\u{0001}"),
        *(r"a**", r"a{2}{3}", r"a++", r"\Aa", r"a\z", "[]", "[^]"),
    ],
)
def test_patterns_that_cannot_be_written_exactly_are_refused(grammars: Grammars, pattern: str) -> None:
    schema = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern}))
    with pytest.raises(RefusedConstraintError, match="cannot be served: the pattern"):
        grammars.check(schema)


def test_white_space_is_that_of_ecmascript(grammars: Grammars) -> None:
    spaces = [chr(code) for code in range(1, 0x10000) if chr(code).isspace() and not 0x1C <= code <= 0x1F]
    spaces = sorted({*spaces, "\ufeff"} - {"\x0b", "\x85"})
    others = ["a", "\x85", "\u180e", "\u200b"]
    for pattern in (r"^\s$", r"^[\s]$", r"^[^\S]$"):
        wanted = {"type": "string", "pattern": pattern}
        assert [char for char in spaces if not takes(grammars, wanted, char, escapes=False)] == []
        assert [char for char in others if takes(grammars, wanted, char, escapes=False)] == []
    for pattern in (r"^\S$", r"^[\S]$", r"^[^\s]$"):
        wanted = {"type": "string", "pattern": pattern}
        assert [char for char in spaces if takes(grammars, wanted, char, escapes=False)] == []
        assert [char for char in others if not takes(grammars, wanted, char, escapes=False)] == []


def test_sets_may_have_signs_of_repetition_and_control_characters_among_others() -> None:
    assert exact_pattern("[*+]{2}") == "[*+]{2}"
    assert exact_pattern(r"[^\x01-\x1f\x7f]+") == r"[^\x00\x01-\x1f\x7f]+"
    assert exact_pattern(r"[a\v]\\v") == r"[a\v]\\v"


def test_escaped_brackets_begin_no_set() -> None:
    assert exact_pattern(r"\[^a\]") == r"\[^a\]"
    assert exact_pattern(r"[\]^a][^b]") == r"[\]^a][^\x00b]"
