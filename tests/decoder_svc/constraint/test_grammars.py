"""Tests that constraints are compiled once, refused with their place, and bounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from decoder_svc.constraint import grammars as module
from decoder_svc.constraint.grammars import Grammars
from decoder_svc.constraint.refusals import RefusedConstraintError
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from tests.decoder_svc.constraint.demo_constraints import demo_grammars


@pytest.fixture
def grammars() -> Grammars:
    return demo_grammars()


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (schema("{"), "is no JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        (schema("[1]"), "must be a JSON object, true or false"),
        (schema("[" * 100_000), "nested too deeply"),
        (schema({"type": "objec"}), "type must be one of null, boolean"),
        (schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (
            schema({"properties": {"a/b": {"items": {"uniqueItems": True}}}}),
            '["uniqueItems"] (at /properties/a~1b/items)',
        ),
        (
            schema({"$ref": "#/$defs/X", "$defs": {"X": {"format": "phone", "type": "string"}}}),
            "Unknown format: phone (at /$defs/X)",
        ),
        (schema({"anyOf": [{"type": "null"}, {"multipleOf": 0}]}), "multipleOf must be above 0, got 0 (at /anyOf/1)"),
        (schema('{"type": "string", "type": "null"}'), 'an object has the name "type" twice'),
        (schema({"$ref": "#"}), "the reference '#' leads back to itself"),
        (schema({"oneOf": [{"maximum": 3}, {"minimum": 9}]}), "oneOf whose schemas may allow the same value"),
        (Constraint(ConstraintKind.GRAMMAR, 'start: %json {"not": {}}'), "cannot have %json; use json_schema"),
        (Constraint(ConstraintKind.GRAMMAR, 'start: <bos> "a"'), 'unknown special token: "<bos>"'),
        # The schema cannot ask for its own keywords to be ignored.
        (schema({"not": {}, "x-guidance": {"lenient": True}}), 'Unimplemented keys: ["not"]'),
        (schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
        (schema({"type": "string", "pattern": "("}), "unclosed group"),
        (schema({"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
        (schema({"$ref": "http://127.0.0.1/schema"}), "leads to another document, which is not supported"),
        (Constraint(ConstraintKind.REGEX, "a(b"), "unclosed group"),
        (Constraint(ConstraintKind.REGEX, r"(a)\1"), "backreferences are not supported"),
        (Constraint(ConstraintKind.REGEX, "(?=a)b"), "look-around"),
        (Constraint(ConstraintKind.GRAMMAR, 'start: "a" thing'), 'unknown name: "thing" (line 1, column 8)'),
        (Constraint(ConstraintKind.GRAMMAR, 'root ::= "a"'), "Expected token '_', found '=' (line 1, column 7)"),
        (Constraint(ConstraintKind.GRAMMAR, 'begin: "a"'), "start"),
        # They would be served as something else.
        (Constraint(ConstraintKind.GRAMMAR, 'start[max_tokens=1]: "abc"'), "no options in brackets"),
        (Constraint(ConstraintKind.GRAMMAR, 'start: x\n?x.2 [temperature=2]: "a"'), "no options in brackets"),
        (Constraint(ConstraintKind.GRAMMAR, '%llguidance {"x": 1}\nstart: "a"'), "cannot have %llguidance"),
        (Constraint(ConstraintKind.REGEX, "(?x)a # c\nb"), "lines are not supported with the flag x"),
        (Constraint(ConstraintKind.REGEX, "a(?ix:\n b)"), "lines are not supported with the flag x"),
        (Constraint(ConstraintKind.REGEX, "a\\"), "a backslash has no character behind it"),
        (Constraint(ConstraintKind.REGEX, "[ab]{3}\\\\\\"), "a backslash has no character behind it"),
        (Constraint(ConstraintKind.REGEX, "a\\\nb"), "a backslash has no character behind it"),
        (schema({"type": "string", "pattern": "a\\"}), "ends with a backslash"),
        (schema({"const": "ab" * 30_000}), "it leaves no choice about too long a text"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_place(
    grammars: Grammars, constraint: Constraint, reason: str
) -> None:
    with pytest.raises(RefusedConstraintError) as caught:
        grammars.check(constraint)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_constraint_is_compiled_once_and_each_request_has_a_state_of_its_own(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    original = module._grammar

    def noting(constraint: Constraint, schemas: Sequence[dict[str, Any]]) -> str:
        compiled.append(constraint)
        return original(constraint, schemas)

    monkeypatch.setattr(module, "_grammar", noting)
    digits = Constraint(ConstraintKind.REGEX, "[0-9]{2}")
    first, second = grammars.matcher(digits), grammars.matcher(Constraint(ConstraintKind.REGEX, "[0-9]{2}"))
    (token_id,) = grammars.tokenizer.tokenize_str("7")
    assert first.consume_tokens([token_id, token_id])
    assert first.is_accepting()
    assert not second.is_accepting()
    assert not grammars.matcher(digits).is_accepting()
    assert compiled == [digits]


def test_a_constraint_that_is_kept_is_not_checked_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = Constraint(ConstraintKind.REGEX, "[0-9]{2}")
    grammars.check(digits)
    monkeypatch.setattr(grammars, "matcher", None)
    grammars.check(digits)


def test_automata_that_have_grown_are_dropped(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in "abc":
        grammars.check(Constraint(ConstraintKind.REGEX, text))
    monkeypatch.setattr(module, "memory_bytes", lambda: 1 << 50)
    grammars.check(Constraint(ConstraintKind.REGEX, "d"))
    assert [constraint.text for constraint in grammars._kept] == ["d"]
    assert grammars._kept_chars == 1


def test_the_latest_constraints_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT", 3)
    monkeypatch.setattr(module, "_MAX_KEPT_CHARS", 40)
    texts = ["a", "b", "c", "a", "d"]
    for text in texts:
        grammars.check(Constraint(ConstraintKind.REGEX, text))
    assert [constraint.text for constraint in grammars._kept] == ["c", "a", "d"]
    grammars.check(Constraint(ConstraintKind.REGEX, "e" * 39))
    assert [len(constraint.text) for constraint in grammars._kept] == [1, 39]
    grammars.check(Constraint(ConstraintKind.REGEX, "f" * 41))
    assert [len(constraint.text) for constraint in grammars._kept] == []
    assert grammars._kept_chars == 0


@pytest.mark.parametrize("text", ["(a{1,1000}){1,1000}", "((a|b)*c){500}x" * 40, "[a-z]{100000}"])
def test_a_hostile_expression_ends_soon(grammars: Grammars, text: str) -> None:
    """It is served or refused, but bounded: without limits, such expressions take minutes and gigabytes."""
    constraint = Constraint(ConstraintKind.REGEX, text)
    before = module.memory_bytes()
    with suppress(RefusedConstraintError):
        matcher = grammars.matcher(constraint)
        (token_id,) = grammars.tokenizer.tokenize_str("a")
        for _ in range(50):
            matcher.compute_bitmask()
            if matcher.is_error() or not matcher.consume_token(token_id):
                break
    assert module.memory_bytes() - before < 1 << 30


@pytest.mark.parametrize("text", ["(?x)a # c", "a\nb", "a\\\\", "(?x: a b )\\#", "[\\\\]\nb"])
def test_lines_and_escapes_that_mean_one_thing_are_served(grammars: Grammars, text: str) -> None:
    grammars.check(Constraint(ConstraintKind.REGEX, text))
    grammars.check(Constraint(ConstraintKind.GRAMMAR, 'start: x [ "b" ]\nx: ["a"] "c" /[a-z]{2}/'))
