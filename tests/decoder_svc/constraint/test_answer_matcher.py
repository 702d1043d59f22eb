"""Tests of masks by random walks: whatever tokens they allow, the answer conforms, as another implementation checks."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from decoder_svc.constraint import answer_matcher
from decoder_svc.constraint import grammars as grammars_module
from decoder_svc.constraint.grammars import Grammars
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from tests.decoder_svc.constraint.demo_constraints import DEMO_VOCAB, END, PROMPT, WholeAnswer, demo_grammars

SHAPES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "places": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 8}, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 4},
    },
    "required": ["colour", "places"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


def state(grammars: Grammars, constraint: Constraint, stops: tuple[int, ...] = (END,)) -> WholeAnswer:
    return WholeAnswer(grammars, constraint, stops)


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def allowed(mask: bytes) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist()
    return found


def walked(constraint: WholeAnswer, rng: random.Random, most: int = 400) -> list[int]:
    """Returns a random answer without its end. Every third step goes through drafts, which may be wrong."""
    ids = list(PROMPT)
    for _ in range(most):
        if rng.random() < 0.3:
            drafts = constraint.forced(ids, 5) or [rng.randrange(DEMO_VOCAB) for _ in range(2)]
            masks = constraint.masks(ids, drafts)
            assert 1 <= len(masks) <= len(drafts) + 1
        else:
            masks = constraint.masks(ids, [])
        assert constraint.error is None
        choices = allowed(masks[0])
        # Ends as soon as it may, half of the time.
        token_id = END if END in choices and rng.random() < 0.5 else rng.choice(choices)
        if token_id == END:
            return ids[len(PROMPT) :]
        ids.append(token_id)
    return []


def text_of(grammars: Grammars, ids: list[int]) -> str:
    data: bytes = grammars.tokenizer.decode_bytes(ids)
    return data.decode()


SCHEMAS: list[Any] = [
    SHAPES,
    {"type": "boolean"},
    {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[ab]{2,3}$"}]},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": False, "minItems": 2},
    {"$defs": {"t": {"type": "object", "properties": {"of": {"$ref": "#/$defs/t"}}, "additionalProperties": False}},
     "$ref": "#/$defs/t"},
    {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 2},
]  # fmt: skip


@pytest.mark.parametrize("wanted", SCHEMAS, ids=str)
def test_random_answers_to_a_schema_conform(grammars: Grammars, wanted: Any) -> None:
    num_finished = 0
    for seed in range(40):
        ids = walked(state(grammars, schema(wanted)), random.Random(seed))
        if ids:
            jsonschema.validate(json.loads(text_of(grammars, ids)), wanted)
            num_finished += 1
    assert num_finished > 20


@pytest.mark.parametrize("pattern", ["[0-9]{2,4}", "(ab|c)*d", "x[^x]y", "red|blue", "a{3}b?"])
def test_random_answers_to_an_expression_match_it(grammars: Grammars, pattern: str) -> None:
    for seed in range(30):
        ids = walked(state(grammars, Constraint(ConstraintKind.REGEX, pattern)), random.Random(seed))
        assert re.fullmatch(pattern, text_of(grammars, ids), re.DOTALL)


def test_random_answers_to_a_grammar_follow_it(grammars: Grammars) -> None:
    pairs = Constraint(ConstraintKind.GRAMMAR, 'start: "(" start ")" | "[" start "]" | "x"')
    for seed in range(30):
        text = text_of(grammars, walked(state(grammars, pairs), random.Random(seed)))
        while "(x)" in text or "[x]" in text:
            text = text.replace("(x)", "x").replace("[x]", "x")
        assert text == "x"


@pytest.mark.parametrize("texts", [["red"], ["a", "ab", "abc"], ['say "x"', "back\\slash", "two\nlines", "é"]], ids=str)
def test_a_choice_is_one_of_its_texts(grammars: Grammars, texts: list[str]) -> None:
    constraint = Constraint(ConstraintKind.CHOICE, json.dumps(texts))
    found = {text_of(grammars, walked(state(grammars, constraint), random.Random(seed))) for seed in range(60)}
    assert found == set(texts)


def test_any_object_is_an_object(grammars: Grammars) -> None:
    constraint = Constraint(ConstraintKind.JSON_OBJECT, "")
    answers = [walked(state(grammars, constraint), random.Random(seed), most=60) for seed in range(30)]
    objects = [json.loads(text_of(grammars, ids)) for ids in answers if ids]
    assert len(objects) > 10
    assert all(isinstance(one, dict) for one in objects)


def test_masks_behind_drafts_are_those_of_the_answer_with_them(grammars: Grammars) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        answer = walked(state(grammars, schema(SHAPES)), rng)
        at_once = state(grammars, schema(SHAPES)).masks(PROMPT, answer)
        step_by_step = state(grammars, schema(SHAPES))
        for length in range(len(answer) + 1):
            assert step_by_step.masks(PROMPT + answer[:length], []) == [at_once[length]]


def test_behind_a_wrong_draft_there_are_no_masks_and_the_state_is_as_before(grammars: Grammars) -> None:
    constraint = state(grammars, Constraint(ConstraintKind.REGEX, "[0-9]{3}"))
    (before,) = constraint.masks(PROMPT, [])
    digit, other = allowed(before)[0], next(one for one in range(3, DEMO_VOCAB) if one not in allowed(before))
    masks = constraint.masks(PROMPT, [digit, other, digit])
    assert masks[0] == before
    assert allowed(masks[1]) == allowed(before)
    assert len(masks) == 2
    assert constraint.masks(PROMPT, []) == [before]
    assert constraint.error is None


def test_forced_tokens_are_allowed_one_after_the_other(grammars: Grammars) -> None:
    constraint = state(grammars, schema(SHAPES))
    forced = constraint.forced(PROMPT, 50)
    assert text_of(grammars, forced) == '{"colour": "'
    for mask, token_id in zip(constraint.masks(PROMPT, forced), forced, strict=False):
        assert token_id in allowed(mask)
    assert constraint.forced(PROMPT, 2) == forced[:2]
    assert state(grammars, Constraint(ConstraintKind.REGEX, "[ab]")).forced(PROMPT, 5) == []


def test_only_tokens_that_end_an_answer_are_allowed_at_its_end_and_not_before(grammars: Grammars) -> None:
    (digit,) = grammars.tokenizer.tokenize_str("4")
    # A digit that also ends an answer, and an end-of-sequence token of the tokenizer that does not end this one.
    constraint = state(grammars, Constraint(ConstraintKind.REGEX, "[0-9]{1,2}"), stops=(9, digit))
    assert digit not in allowed(constraint.masks(PROMPT, [])[0])
    (other,) = grammars.tokenizer.tokenize_str("5")
    behind_one = allowed(constraint.masks([*PROMPT, other], [])[0])
    assert {9, digit} <= set(behind_one)
    assert END not in behind_one
    assert allowed(constraint.masks([*PROMPT, other, other], [])[0]) == sorted([9, digit])


def test_an_answer_that_the_grammar_does_not_take_is_an_error(grammars: Grammars) -> None:
    constraint = state(grammars, Constraint(ConstraintKind.REGEX, "[0-9]"))
    (letter,) = grammars.tokenizer.tokenize_str("a")
    assert constraint.masks([*PROMPT, letter], [1, 2]) == []
    assert constraint.error
    assert constraint.forced([*PROMPT, letter, letter], 3) == []


def test_a_vocabulary_that_cannot_write_the_answer_is_an_error(grammars: Grammars) -> None:
    # Another alphabet than that of the logits: only the first 40 tokens have one.
    constraint = WholeAnswer(grammars, Constraint(ConstraintKind.REGEX, "q"), num_logits=40)
    assert constraint.masks(PROMPT, []) == []
    assert constraint.error == "no token of the vocabulary can continue the answer"


def test_an_answer_that_takes_too_much_processor_time_is_an_error(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_matcher, "_FREE_S", 0.0)
    constraint = state(grammars, Constraint(ConstraintKind.REGEX, "[0-9]{3}"))
    assert constraint.masks(PROMPT, []) == []
    assert constraint.error == "the constraint takes too much processor time per token"


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits under which one answer fits and two do not."""
    few = LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "_LIMITS", few)


@pytest.mark.usefixtures("few_states")
def test_answers_do_not_use_up_the_automaton_of_later_ones(grammars: Grammars) -> None:
    """Copies of a matcher share the states that any of them needed, and their number is bounded."""
    wanted = schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 400}}, "required": ["a"]})
    for seed in range(6):
        rng = random.Random(seed)
        text = json.dumps({"a": "".join(rng.choice('abc é"\\') for _ in range(200))}, ensure_ascii=False)
        answer = WholeAnswer(grammars, wanted)
        ids = list(PROMPT)
        for token_id in grammars.tokenizer.tokenize_str(text):
            assert token_id in allowed(answer.masks(ids, [])[0]), answer.error
            ids.append(token_id)
        assert END in allowed(answer.masks(ids, [])[0])


def random_answer(grammars: Grammars, constraint: Constraint, seed: int) -> tuple[list[int], str]:
    """Returns the tokens and the text of a random answer."""
    rng = random.Random(seed)
    answer, ids = WholeAnswer(grammars, constraint), list(PROMPT)
    while True:
        tokens = sorted(allowed(answer.masks(ids, [])[0]))
        assert tokens, answer.error
        token_id = rng.choice(tokens)
        if token_id == END:
            found = ids[len(PROMPT) :]
            return found, grammars.tokenizer.decode_bytes(found).decode()
        ids.append(token_id)


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        (Constraint(ConstraintKind.CHOICE, json.dumps(["red<bos>1", "<image>", "<|user|><eos>"])), None),
        (Constraint(ConstraintKind.REGEX, "(red|blue)<(bos|pad)>x"), None),
        (schema({"enum": ["<image>", "a<eos>"]}), ['"<image>"', '"a<eos>"']),
        (Constraint(ConstraintKind.GRAMMAR, 'start: "<pad>" "<bos>"'), ["<pad><bos>"]),
    ],
)
def test_texts_that_spell_control_tokens_have_the_tokens_of_their_characters(
    grammars: Grammars, constraint: Constraint, texts: list[str] | None
) -> None:
    for seed in range(20):
        ids, text = random_answer(grammars, constraint, seed)
        assert not grammars.control_token_ids & set(ids)
        if constraint.kind is ConstraintKind.REGEX:
            assert re.fullmatch(constraint.text, text)
        else:
            assert text in (texts or json.loads(constraint.text))


def test_control_tokens_that_a_grammar_names_by_number_are_not_allowed(grammars: Grammars) -> None:
    answer = WholeAnswer(grammars, Constraint(ConstraintKind.GRAMMAR, 'start: "a" <[3]> "b"'))
    ids = [*PROMPT, *grammars.tokenizer.tokenize_str("a")]
    assert answer.masks(ids, []) == []
    assert answer.error is not None


def test_a_draft_that_its_mask_allows_and_the_grammar_does_not_take_ends_the_answer(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be accepted, and the answer would go on without a constraint."""
    answer = WholeAnswer(grammars, Constraint(ConstraintKind.REGEX, "[a-z]+"))
    (token_id,) = grammars.tokenizer.tokenize_str("a")

    class Failing:
        def __init__(self, matcher: LLMatcher) -> None:
            self._matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return (lambda token_id: False) if name == "consume_token" else getattr(self._matcher, name)

    monkeypatch.setattr(answer._matcher, "_start", lambda is_new: Failing(grammars.matcher(answer.constraint, is_new)))
    monkeypatch.setattr(answer._matcher, "_matcher", answer._matcher._start(True))
    assert answer.masks(PROMPT, [token_id]) == []
    assert answer.error is not None


def test_few_drafts_are_taken_of_a_long_forced_text(grammars: Grammars) -> None:
    """Each mask behind one of them takes time in proportion to the text that is left."""
    for length, most in ((500, 32), (4000, 8), (16_000, 2)):
        constraint = state(grammars, schema({"const": "".join(random.Random(0).choices("ab", k=length))}))
        forced = constraint.forced(PROMPT, 32)
        assert most / 2 <= len(forced) <= most
        assert len(constraint.masks(PROMPT, forced)) == len(forced) + 1
        assert constraint.error is None
