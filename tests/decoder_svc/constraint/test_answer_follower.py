"""Tests that answers are followed as by a matcher here, whatever becomes of the process that follows them."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from decoder_svc.constraint import current_process, question
from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.constraint.current_process import CurrentProcess
from decoder_svc.constraint.followed_answer import FollowedAnswer
from decoder_svc.constraint.grammars import Grammars
from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint, ConstraintKind
from lookonce.errors import InvalidParameterError, UnavailableError
from lookonce.process import process_clock
from lookonce.process.limited_process import LimitedProcess
from tests.decoder_svc.constraint.demo_constraints import (
    DEMO_VOCAB,
    END,
    PROMPT,
    WholeAnswer,
    demo_grammars,
    demo_vocabulary,
    masks_of,
)
from tests.decoder_svc.constraint.test_constraint_checker import chain

DIGITS = Constraint(ConstraintKind.REGEX, "[0-9]{3}(, [a-z]{2,4}){2}")
CONSTRAINTS = [
    DIGITS,
    Constraint(ConstraintKind.JSON_OBJECT, ""),
    Constraint(ConstraintKind.GRAMMAR, 'start: "(" start ")" | "[" start "]" | "x"'),
    Constraint(ConstraintKind.CHOICE, json.dumps(["yes", "no", "not at all"])),
    Constraint(
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}),
    ),
]
# Most forced tokens of all answers of a step.
NUM_FORCED = 12


@pytest.fixture
def follower() -> Iterator[AnswerFollower]:
    follower = AnswerFollower(demo_vocabulary, DEMO_VOCAB, guesses_above_s=-1.0)
    yield follower
    follower.close()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


def begun(follower: AnswerFollower, constraint: Constraint, *, is_greedy: bool = False) -> FollowedAnswer:
    follower.prepare(constraint)
    answer = follower.follow(constraint, len(PROMPT), (END,), is_greedy=is_greedy)
    assert isinstance(answer, FollowedAnswer)
    return answer


def pid_of(follower: AnswerFollower) -> int:
    assert follower._current._process is not None
    return follower._current._process.pid


def allowed(mask: bytes) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist()
    return found


class Walk:
    """A random answer that two sides follow. A greedy one is asked about guesses."""

    def __init__(
        self, follower: AnswerFollower, grammars: Grammars, constraint: Constraint, *, is_greedy: bool = False
    ) -> None:
        self.followed = begun(follower, constraint, is_greedy=is_greedy)
        self.is_greedy = is_greedy
        self.alone = WholeAnswer(grammars, constraint)
        self.ids = list(PROMPT)
        self.has_ended = False
        # The expected outcome of the guesses.
        self.expected: int | bytes = 0

    def so_far(self, draft_ids: tuple[int, ...] = ()) -> AnswerSoFar:
        return AnswerSoFar(self.followed, self.ids, draft_ids)

    def go_on(self, mask: bytes, rng: random.Random) -> None:
        self.append(rng.choice(allowed(mask)))

    def append(self, token_id: int) -> None:
        self.has_ended = token_id == END
        self.ids.append(token_id)


def check_guesses(follower: AnswerFollower, walks: list[Walk], rng: random.Random) -> None:
    """Asks about guesses, and goes on with those that may come."""
    guesses, masks = [], []
    for walk in walks:
        is_forced = bool(walk.alone.forced(walk.ids, 1))
        (mask,) = walk.alone.masks(walk.ids, [])
        masks.append(mask)
        some = [*rng.sample(range(DEMO_VOCAB), 3), *rng.sample(allowed(mask), min(2, len(allowed(mask))))]
        guesses.append(rng.sample(some, rng.randint(1, len(some))))
        expected = [index for index, token_id in enumerate(guesses[-1]) if token_id in allowed(mask)]
        walk.expected = mask if is_forced or not expected else expected[0]
    found = follower.check([walk.so_far() for walk in walks], guesses)
    for walk, of_walk, mask, guess_or_mask in zip(walks, guesses, masks, found, strict=True):
        assert guess_or_mask == walk.expected
        if isinstance(guess_or_mask, int):
            walk.append(of_walk[guess_or_mask])
        else:
            walk.go_on(mask, rng)


def forced_alone(walks: list[Walk]) -> list[list[int]]:
    """Returns the forced tokens of each answer, NUM_FORCED of all together."""
    found: list[list[int]] = []
    for walk in walks:
        found.append(walk.alone.forced(walk.ids, NUM_FORCED)[: NUM_FORCED - sum(map(len, found))])
    return found


def drawn_drafts(forced: list[int], rng: random.Random) -> tuple[int, ...]:
    """Returns forced tokens, as many as there is room for, or guesses where there are none."""
    if forced and rng.random() < 0.8:
        return tuple(forced[: rng.randint(0, len(forced))])
    return tuple(rng.randrange(DEMO_VOCAB) for _ in range(rng.randrange(3)))


@pytest.mark.parametrize("seed", range(3))
def test_masks_and_forced_tokens_are_those_of_a_matcher_here_though_processes_are_killed(
    follower: AnswerFollower, grammars: Grammars, seed: int
) -> None:
    rng = random.Random(seed)
    walks = [Walk(follower, grammars, rng.choice(CONSTRAINTS), is_greedy=number % 2 == 0) for number in range(12)]
    num_kills = num_asked = num_guessed = 0
    for _ in range(25):
        live = [walk for walk in walks if not walk.has_ended and rng.random() < 0.8]
        if rng.random() < 0.3:
            os.kill(pid_of(follower), rng.choice([signal.SIGKILL, signal.SIGTERM]))
            num_kills += 1
        # A part of the answers comes behind a prompt, which the scheduler does not ask about.
        asked = [walk for walk in live if rng.random() < 0.8]
        begun_with = [walk for walk in asked if rng.random() < 0.9]
        is_ahead = rng.random() < 0.7
        if is_ahead:
            follower.begin([walk.so_far() for walk in begun_with], NUM_FORCED)
            if rng.random() < 0.2 and follower._current._process is not None:
                os.kill(pid_of(follower), signal.SIGKILL)
                num_kills += 1
        forced = follower.forced([walk.so_far() for walk in asked], NUM_FORCED)
        assert forced == forced_alone(asked)
        drafts = {id(walk): drawn_drafts(ids, rng) for walk, ids in zip(asked, forced, strict=True)}
        if rng.random() < 0.2 and follower._current._process is not None:
            os.kill(pid_of(follower), signal.SIGKILL)
            num_kills += 1
        cut = rng.randrange(len(live) + 1) if rng.random() < 0.3 else len(live)
        for part in (live[:cut], live[cut:]):
            so_far = [walk.so_far(drafts.get(id(walk), ())) for walk in part]
            finish = follower.begin_masks(so_far)
            if rng.random() < 0.3 and follower._current._process is not None:
                os.kill(pid_of(follower), signal.SIGKILL)
                num_kills += 1
            guessed = []
            for walk, answer, masks in zip(part, so_far, finish(), strict=True):
                num_asked += 1
                if masks is None:
                    assert walk.is_greedy
                    assert not answer.draft_ids
                    guessed.append(walk)
                    continue
                expected = walk.alone.masks(walk.ids, answer.draft_ids)
                assert len(masks) == 1 + len(answer.draft_ids)
                assert masks[: len(expected)] == expected
                assert all(mask == b"\xff" * len(mask) for mask in masks[len(expected) :])
                walk.go_on(masks[0], rng)
            if guessed:
                num_guessed += len(guessed)
                if rng.random() < 0.2 and follower._current._process is not None:
                    os.kill(pid_of(follower), signal.SIGKILL)
                    num_kills += 1
                check_guesses(follower, guessed, rng)
    assert num_kills > 3
    assert num_asked > 40
    assert num_guessed > 15
    assert all(walk.followed.error is None for walk in walks)


def test_a_question_that_nobody_waited_for_does_not_answer_the_next_one(follower: AnswerFollower) -> None:
    digits, choice = begun(follower, DIGITS), begun(follower, CONSTRAINTS[3])
    follower.begin_masks([AnswerSoFar(digits, PROMPT)])
    (masks,) = masks_of(follower, [AnswerSoFar(choice, PROMPT)])
    ((again,),) = masks_of(follower, [AnswerSoFar(choice, PROMPT)])
    assert masks == [again]
    ((other,),) = masks_of(follower, [AnswerSoFar(digits, PROMPT)])
    assert other != again
    expected = follower.forced([AnswerSoFar(digits, PROMPT)], 4)
    follower.forced([AnswerSoFar(choice, PROMPT)], 4)
    assert follower.forced([AnswerSoFar(digits, PROMPT)], 4) == expected
    ((once_more,),) = masks_of(follower, [AnswerSoFar(choice, PROMPT)])
    assert once_more == again


def test_the_answer_that_ends_processes_ends_and_no_other_one(
    follower: AnswerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_process, "_STACK_BYTES", 1 << 20)
    good, bad, other = begun(follower, DIGITS), begun(follower, chain(3500)), begun(follower, CONSTRAINTS[3])
    asked = [AnswerSoFar(answer, PROMPT) for answer in (good, bad, other)]
    for _ in range(3):
        masks = masks_of(follower, asked)
        assert isinstance(bad.error, InvalidParameterError)
        assert bad.error.field == "sampling.json_schema"
        assert "the answer cannot go on" in bad.error.message
        assert good.error is other.error is None
        assert masks[0] != masks[2]
        assert 0 < len(allowed(masks[0][0])) < 100
        assert 0 < len(allowed(masks[2][0])) < 100
        assert masks[1] == [b"\xff" * len(masks[0][0])]


def test_an_answer_that_hangs_its_process_ends(follower: AnswerFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = begun(follower, DIGITS), begun(follower, CONSTRAINTS[3])
    # No processor time is allowed at all: whatever is asked first takes too long.
    monkeypatch.setattr(question, "_CPU_S", 0.0)
    monkeypatch.setattr(question, "_CPU_S_PER_MASK", 0.0)
    monkeypatch.setattr(process_clock, "_LOOK_S", 0.0)
    follower.begin_masks([AnswerSoFar(bad, PROMPT)])()
    assert isinstance(bad.error, InvalidParameterError)
    monkeypatch.undo()
    follower.begin_masks([AnswerSoFar(good, PROMPT)])()
    assert good.error is None


def test_processes_that_are_always_killed_are_no_answers_fault(
    follower: AnswerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = begun(follower, DIGITS)
    original = CurrentProcess.running

    def killed(self: CurrentProcess) -> Any:
        process = original(self)
        process._process.stop()
        return process

    monkeypatch.setattr(CurrentProcess, "running", killed)
    follower.begin_masks([AnswerSoFar(answer, PROMPT)])()
    assert isinstance(answer.error, UnavailableError)
    assert follower.forced([AnswerSoFar(answer, PROMPT)], 4) == [[]]


def test_ended_answers_are_forgotten(follower: AnswerFollower) -> None:
    answer = begun(follower, DIGITS)
    number = answer.answer_id
    follower.forced([AnswerSoFar(answer, PROMPT)], 4)
    del answer
    follower.forced([], 4)
    gc.collect()
    assert follower._current.take_ended_ids() == [number]
    assert follower._current.take_ended_ids() == []


def test_a_closed_follower_has_no_process_and_gives_errors(follower: AnswerFollower) -> None:
    answer = begun(follower, DIGITS)
    process = psutil.Process(pid_of(follower))
    follower.close()
    assert not process.is_running()
    follower.begin_masks([AnswerSoFar(answer, PROMPT)])()
    assert isinstance(answer.error, UnavailableError)
    with pytest.raises(UnavailableError):
        follower.prepare(DIGITS)


def test_a_constraint_is_compiled_while_others_are_followed(follower: AnswerFollower) -> None:
    """One thread compiles, and one asks: each gets its own outcomes."""
    answer = begun(follower, DIGITS)
    (expected,) = masks_of(follower, [AnswerSoFar(answer, PROMPT)])
    stop = threading.Event()

    def compile_many() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            follower.prepare(Constraint(ConstraintKind.REGEX, f"[a-z]{{{number}}}"))

    thread = threading.Thread(target=compile_many)
    thread.start()
    for _ in range(300):
        assert follower.begin_masks([AnswerSoFar(answer, PROMPT)])() == [expected]
    stop.set()
    thread.join()


def test_answers_get_their_own_masks_when_they_differ_in_every_step(follower: AnswerFollower) -> None:
    """More different masks than both sides keep, in one question and in many."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=40)) for _ in range(20)]
    answers = [begun(follower, Constraint(ConstraintKind.CHOICE, json.dumps([text, text[::-1]]))) for text in texts]
    tokens = [demo_grammars().tokenizer.tokenize_str(text) for text in texts]
    for length in range(max(map(len, tokens))):
        so_far = [
            AnswerSoFar(answer, [*PROMPT, *ids[:length]], ids[length : length + 40])
            for answer, ids in zip(answers, tokens, strict=True)
            if length < len(ids)
        ]
        follower.forced([AnswerSoFar(one.constraint, one.token_ids) for one in so_far], NUM_FORCED)
        for one, masks in zip(so_far, masks_of(follower, so_far), strict=True):
            for token_id, mask in zip(one.draft_ids, masks, strict=False):
                assert token_id in allowed(mask)


def test_an_answer_goes_on_though_the_processes_that_start_after_a_kill_are_killed_too(
    follower: AnswerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = begun(follower, DIGITS)
    expected = follower.begin_masks([AnswerSoFar(answer, PROMPT)])()
    original, kills = LimitedProcess._wait_until_ready, [signal.SIGTERM, signal.SIGKILL]

    def killed(process: LimitedProcess) -> None:
        if kills:
            os.kill(process.pid, kills.pop())
        original(process)

    monkeypatch.setattr(LimitedProcess, "_wait_until_ready", killed)
    os.kill(pid_of(follower), signal.SIGKILL)
    assert follower.begin_masks([AnswerSoFar(answer, PROMPT)])() == expected
    assert answer.error is None
    assert kills == []
