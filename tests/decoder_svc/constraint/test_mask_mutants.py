"""Faults seeded into what is done with constraints: random walks notice each of them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from decoder_svc.constraint import answer_matcher
from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.constraint.answer_matcher import AnswerMatcher
from decoder_svc.constraint.constraint_process import ConstraintProcess
from decoder_svc.constraint.followed_answer import FollowedAnswer
from decoder_svc.constraint.frames import Step
from decoder_svc.constraint.grammars import Grammars
from decoder_svc.constraint.question import Question
from decoder_svc.constraint.refusals import RefusedConstraintError
from decoder_svc.constraint.schema import json_schema
from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint, ConstraintKind
from tests.decoder_svc.constraint import random_constraints, test_answer_follower
from tests.decoder_svc.constraint.demo_constraints import (
    DEMO_VOCAB,
    END,
    PROMPT,
    WholeAnswer,
    demo_grammars,
    demo_vocabulary,
)
from tests.decoder_svc.constraint.test_answer_follower import allowed
from tests.decoder_svc.scheduling.mutation import Mutations, Patch

mutation = Mutations()
# The token that ends answers here, which is not the tokenizer's own.
OWN_END = 1
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "code": {"type": "string", "pattern": '^[^"a]{1,2}$'}},
    "required": ["colour", "code"],
    "additionalProperties": False,
}
PATTERN = "[0-9]{2,3}(, [a-z]{2}){0,2}"
REGEX = Constraint(ConstraintKind.REGEX, PATTERN)
OBJECT = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))


@mutation
def an_answer_may_end_anywhere(patch: Patch) -> None:
    original = AnswerMatcher._mask

    def mask(self: AnswerMatcher) -> Any:
        return original(self) | self._stops

    patch.setattr(AnswerMatcher, "_mask", mask)


@mutation
def an_answer_never_ends(patch: Patch) -> None:
    original = AnswerMatcher._mask

    def mask(self: AnswerMatcher) -> Any:
        words = original(self)
        rest = words & ~self._stops
        return rest if rest.any() else words

    patch.setattr(AnswerMatcher, "_mask", mask)


@mutation
def the_tokenizers_own_end_is_allowed(patch: Patch) -> None:
    original = AnswerMatcher.__init__

    def init(self: AnswerMatcher, matcher: Any, stops: Any, num_logits: int, ends: Any, num_ids: int) -> None:
        original(self, matcher, stops, num_logits, (), num_ids)

    patch.setattr(AnswerMatcher, "__init__", init)


@mutation
def drafts_are_not_taken_back(patch: Patch) -> None:
    original = AnswerMatcher.masks

    def masks(self: AnswerMatcher, token_ids: Sequence[int], draft_ids: Sequence[int]) -> list[bytes]:
        found = original(self, token_ids, draft_ids)
        self._matcher.consume_tokens(list(draft_ids[: max(0, len(found) - 1)]))
        return found

    patch.setattr(AnswerMatcher, "masks", masks)


@mutation
def masks_behind_drafts_are_those_before_them(patch: Patch) -> None:
    original = AnswerMatcher.masks

    def masks(self: AnswerMatcher, token_ids: Sequence[int], draft_ids: Sequence[int]) -> list[bytes]:
        found = original(self, token_ids, draft_ids)
        return [found[0], *found[:-1]] if len(found) > 1 else found

    patch.setattr(AnswerMatcher, "masks", masks)


@mutation
def masks_begin_with_the_second_token(patch: Patch) -> None:
    original = answer_matcher._bits
    patch.setattr(answer_matcher, "_bits", lambda ids, num_words: original([one + 1 for one in ids], num_words))


@mutation
def unknown_keywords_are_ignored(patch: Patch) -> None:
    original = json_schema._value

    def value(key: str, value: Any) -> Any:
        try:
            return original(key, value)
        except ValueError:
            return value

    patch.setattr(json_schema, "_value", value)


@mutation
def patterns_are_left_as_they_are(patch: Patch) -> None:
    patch.setattr(json_schema, "exact_pattern", lambda pattern: pattern)


@mutation
def a_token_is_read_twice(patch: Patch) -> None:
    original = FollowedAnswer.step

    def step(self: FollowedAnswer, process: Any, answer: AnswerSoFar) -> Step:
        found = original(self, process, answer)
        self._num_read -= bool(found.token_ids)
        return found

    patch.setattr(FollowedAnswer, "step", step)


@mutation
def a_new_process_gets_the_newest_tokens_only(patch: Patch) -> None:
    original = FollowedAnswer.step

    def step(self: FollowedAnswer, process: Any, answer: AnswerSoFar) -> Step:
        num_read = self._num_read
        found = original(self, process, answer)
        del found.token_ids[: num_read - len(PROMPT)]
        return found

    patch.setattr(FollowedAnswer, "step", step)


@mutation
def a_new_process_is_not_told_the_constraint(patch: Patch) -> None:
    original = FollowedAnswer.step

    def step(self: FollowedAnswer, process: Any, answer: AnswerSoFar) -> Step:
        is_first = self._process is None
        found = original(self, process, answer)
        found.opening = found.opening if is_first else None
        return found

    patch.setattr(FollowedAnswer, "step", step)


@mutation
def outcomes_of_an_abandoned_question_answer_the_next_one(patch: Patch) -> None:
    patch.setattr(AnswerFollower, "_wait", lambda self: None)


@mutation
def masks_behind_forced_tokens_are_taken_for_those_behind_guesses(patch: Patch) -> None:
    patch.setattr(Question, "covers", lambda self, answer: id(answer.constraint) in self._indices)


@mutation
def a_kill_from_outside_blames_the_answer(patch: Patch) -> None:
    patch.setattr(ConstraintProcess, "was_killed_from_outside", lambda self: False)


@mutation
def outcomes_are_given_to_answers_in_another_order(patch: Patch) -> None:
    original = Question.masks
    patch.setattr(Question, "masks", lambda self: original(self)[::-1])


@mutation
def the_first_guess_is_always_taken(patch: Patch) -> None:
    patch.setattr(AnswerFollower, "check", lambda self, answers, guesses: [0] * len(answers))


@mutation
def a_guess_that_was_read_is_sent_again(patch: Patch) -> None:
    patch.setattr(FollowedAnswer, "note_read", lambda self, is_forced: None)


@mutation
def tokens_behind_a_guess_are_never_asked_about(patch: Patch) -> None:
    original = FollowedAnswer.note_read
    patch.setattr(FollowedAnswer, "note_read", lambda self, is_forced: original(self, is_forced=False))


@mutation
def a_refused_guess_gets_the_mask_of_another_answer(patch: Patch) -> None:
    original = AnswerFollower.check

    def check(self: AnswerFollower, answers: Any, guesses: Any) -> list[int | bytes]:
        found = original(self, answers, guesses)
        masks = [one for one in found if isinstance(one, bytes)][::-1]
        return [masks.pop(0) if isinstance(one, bytes) else one for one in found]

    patch.setattr(AnswerFollower, "check", check)


@mutation
def guesses_may_be_control_tokens(patch: Patch) -> None:
    original = AnswerMatcher._reads

    def reads(self: AnswerMatcher, token_id: int) -> bool:
        return token_id in self._control_token_ids or original(self, token_id)

    patch.setattr(AnswerMatcher, "_reads", reads)


@mutation
def a_guess_may_end_an_answer_anywhere(patch: Patch) -> None:
    original = AnswerMatcher._reads

    def reads(self: AnswerMatcher, token_id: int) -> bool:
        return token_id in self._stop_token_ids or original(self, token_id)

    patch.setattr(AnswerMatcher, "_reads", reads)


@mutation
def a_guess_may_split_a_forced_text_in_its_own_way(patch: Patch) -> None:
    original = AnswerMatcher._first_of

    def first_of(self: AnswerMatcher, token_ids: Any, guess_ids: Any) -> Any:
        if self._has_read(token_ids) and self._matcher.compute_ff_tokens():
            for index, token_id in enumerate(guess_ids):
                if self._reads(token_id):
                    return index
        return original(self, (), guess_ids)

    patch.setattr(AnswerMatcher, "_first_of", first_of)


def walk_alone(grammars: Grammars, constraint: Constraint, rng: random.Random) -> str:
    """Draws an answer, partly through forced tokens, and returns its text."""
    state, ids = WholeAnswer(grammars, constraint, stops=(OWN_END,)), list(PROMPT)
    for _ in range(120):
        drafts = state.forced(ids, 4) if rng.random() < 0.5 else []
        masks = state.masks(ids, drafts)
        assert masks, state.error
        for index, mask in enumerate(masks):
            is_draft = index < len(drafts) and rng.random() < 0.8
            token_id = drafts[index] if is_draft else rng.choice(allowed(mask))
            assert token_id in allowed(mask), "a forced token is not allowed"
            assert END not in allowed(mask), "only the stop tokens of the request end its answer"
            if token_id == OWN_END:
                return grammars.tokenizer.decode_bytes(ids[len(PROMPT) :]).decode()
            ids.append(token_id)
            if not is_draft:
                break
    raise AssertionError("no end")


def check_alone(grammars: Grammars) -> None:
    texts = [walk_alone(grammars, REGEX, random.Random(seed)) for seed in range(20)]
    assert all(re.fullmatch(PATTERN, text) for text in texts)
    assert any("," not in text for text in texts), "none of them has ended early"
    for seed in range(20):
        jsonschema.validate(json.loads(walk_alone(grammars, OBJECT, random.Random(seed))), SCHEMA)
    for kind in random_constraints.KINDS:
        for case, rng in random_constraints.cases(kind, range(12)):
            random_constraints.check(grammars, case, rng)
    matcher = grammars.matcher(OBJECT)
    quoted = '{"colour": "red", "code": "\\""}'
    ids = [token_id for byte in quoted.encode() for token_id in grammars.tokenizer.tokenize_bytes(bytes([byte]))]
    assert matcher.try_consume_tokens(ids) < len(ids)
    with pytest.raises(RefusedConstraintError):
        grammars.check(Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object", "propertys": {}}'))


def noticed() -> bool:
    """Runs the checks of this process first, and then those of a follower's process."""
    grammars, follower = demo_grammars(), AnswerFollower(demo_vocabulary, DEMO_VOCAB, guesses_above_s=-1.0)
    try:
        check_alone(grammars)
        test_answer_follower.test_a_question_that_nobody_waited_for_does_not_answer_the_next_one(follower)
        test_answer_follower.test_masks_and_forced_tokens_are_those_of_a_matcher_here_though_processes_are_killed(
            follower, grammars, 0
        )
    except (AssertionError, IndexError, ValueError, jsonschema.ValidationError, pytest.fail.Exception):
        return True
    finally:
        follower.close()
    return False


def test_masks_as_they_are_pass() -> None:
    assert not noticed()


@pytest.mark.parametrize("name", mutation)
def test_each_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation[name](monkeypatch)
    assert noticed()
