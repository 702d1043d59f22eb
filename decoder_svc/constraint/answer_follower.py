"""Follows the answers of an engine's requests in a process of its own, and survives that process.

The state of an answer's grammar is a matter of its constraint and its tokens, which the engine has. So when the process
ends, for whatever reason, a new one gets both, and no answer is lost. An answer that was being computed while two
processes ended is the reason, and its request ends.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Sequence

from decoder_svc.constraint.constraint_checker import field_of
from decoder_svc.constraint.current_process import CurrentProcess
from decoder_svc.constraint.fixed_answer import FixedAnswer
from decoder_svc.constraint.followed_answer import FollowedAnswer, followed
from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.constraint.question import Question
from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint, ConstraintKind
from lookonce.errors import InvalidParameterError
from lookonce.process.process_clock import ProcessClock, TimeLimits

# Steps with guesses before masks are computed in one, so that it is known what they take.
_STEPS_PER_LOOK = 16
# Processor time to compile a constraint for the second time.
_COMPILE_LIMITS = TimeLimits(cpu_s=10.0, wall_s=30.0)


class AnswerFollower:
    """Follows answers (ConstraintFollower). The engine's thread asks; one other thread may call `prepare`."""

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary], num_logits: int, *, guesses_above_s: float = math.inf
    ) -> None:
        """A mask has a bit for each of `num_logits` tokens. `load_vocabulary` is called before the first answer.

        Where the masks of a step take more processor time than `guesses_above_s`, in seconds, greedy answers are asked
        about their likeliest tokens instead. A mask is computed if none of them may come.
        """
        self._current = CurrentProcess(load_vocabulary)
        self._num_logits = num_logits
        self._guesses_above_s = guesses_above_s
        # Whether greedy answers are asked about their likeliest tokens in this step, and since how many steps.
        self._is_guessing = False
        self._num_guessed_steps = 0
        self._all = b"\xff" * (4 * -(-num_logits // 32))
        self._ids = itertools.count()
        # The question about forced tokens and masks of this step, and the last one about masks of other answers.
        self._question: Question | None = None
        self._further: Question | None = None

    def prepare(self, constraint: Constraint) -> None:
        """Starts the process if there is none, and compiles a constraint that has been checked, ahead of its answer.

        Raises InvalidParameterError if it is refused after all, and what starting a process raises. Where the process
        ends, the answer will tell.
        """
        if constraint.kind is ConstraintKind.FIXED_TOKENS:
            return
        process = self._current.running()
        clock = ProcessClock(process.pid, _COMPILE_LIMITS)
        try:
            refusal = process.check(constraint, clock.wait_s)
        except (EOFError, OSError):
            self._current.end(process)
            return
        if refusal is not None:
            raise InvalidParameterError(field_of(constraint), refusal)

    def follow(
        self,
        constraint: Constraint,
        num_prompt_tokens: int,
        stop_token_ids: Collection[int],
        *,
        is_greedy: bool = False,
    ) -> FollowedAnswer | FixedAnswer:
        """Begins an answer behind a prompt. `stop_token_ids` end it.

        `is_greedy`: the likeliest of the tokens that may come is the next one.
        """
        if constraint.kind is ConstraintKind.FIXED_TOKENS:
            return FixedAnswer(self, constraint, num_prompt_tokens, self._num_logits)
        answer = FollowedAnswer(
            self,
            next(self._ids),
            constraint,
            num_prompt_tokens,
            stop_token_ids,
            self._num_logits,
            is_greedy=is_greedy,
        )
        weakref.finalize(answer, self._current.ended_ids.append, answer.answer_id)
        return answer

    def begin(self, answers: Sequence[AnswerSoFar], num_tokens: int) -> None:
        """Begins to compute forced tokens and masks, as ConstraintFollower says."""
        self._wait()
        grammars = [one for one in answers if _fixed(one) is None]
        self._decide(grammars)
        asked = [one for one in grammars if not (self._guesses(one) and followed(one).is_free(one))]
        self._question = Question(self._current, asked, num_tokens, guesses_later=self._is_guessing)

    def forced(self, answers: Sequence[AnswerSoFar], num_tokens: int) -> list[list[int]]:
        """Returns the tokens that grammars leave no choice about, as ConstraintFollower says."""
        asked = [one for one in answers if _fixed(one) is None and not followed(one).is_free(one)]
        question = self._question
        if not answers or (asked and (question is None or not all(map(question.is_about, asked)))):
            self.begin(answers, num_tokens)
            question = self._question
        found = []
        for answer in answers:
            fixed = _fixed(answer)
            if fixed is not None:
                found.append(fixed.forced(answer, num_tokens))
            elif followed(answer).is_free(answer):
                found.append([])
            else:
                assert question is not None, "it was asked"
                found.append(question.forced_of(answer))
        return found

    def begin_masks(self, answers: Sequence[AnswerSoFar]) -> Callable[[], list[list[bytes] | None]]:
        """Begins to compute masks, as ConstraintFollower says."""
        first, further = self._question, self._further
        if first is None:
            self._decide([one for one in answers if _fixed(one) is None])
        others: list[AnswerSoFar] = []

        def further_masks(answer: AnswerSoFar) -> list[bytes]:
            assert further is not None, "the answer was asked about"
            return self._masks(further, answer)

        outcomes: list[Callable[[], list[bytes] | None]] = []
        for answer in answers:
            fixed = _fixed(answer)
            if fixed is not None:
                outcomes.append(functools.partial(fixed.masks, answer))
            elif first is not None and first.covers(answer):
                outcomes.append(functools.partial(self._masks, first, answer))
            elif self._guesses(answer):
                outcomes.append(lambda: None)
            else:
                others.append(answer)
                outcomes.append(functools.partial(further_masks, answer))
        if others:
            if further is not None:
                further.masks()
            further = self._further = Question(self._current, others, 0, before=first)
        return lambda: [outcome() for outcome in outcomes]

    def check(self, answers: Sequence[AnswerSoFar], guesses: Sequence[Sequence[int]]) -> list[int | bytes]:
        """Returns which guesses come next, as ConstraintFollower says."""
        self._wait()
        return Question(self._current, answers, 0, guesses=guesses).guess_or_mask()

    def close(self) -> None:
        """Ends the process. Answers cannot be followed any more."""
        self._current.close()

    def _wait(self) -> None:
        """Waits for outcomes that nobody has read, which must not be taken for the next ones."""
        for question in (self._question, self._further):
            if question is not None:
                question.masks()
        self._question = self._further = None

    def _masks(self, question: Question, answer: AnswerSoFar) -> list[bytes]:
        """Waits for the masks of an answer that a question covers."""
        found = question.masks_of(answer) or []
        return [*found, *[self._all] * (1 + len(answer.draft_ids) - len(found))]

    def _decide(self, answers: Sequence[AnswerSoFar]) -> None:
        """Decides whether greedy answers are asked about guesses in this step."""
        mask_s = sum(followed(answer).mask_s for answer in answers)
        self._is_guessing = mask_s > self._guesses_above_s and self._num_guessed_steps < _STEPS_PER_LOOK
        self._num_guessed_steps = self._num_guessed_steps + 1 if self._is_guessing else 0

    def _guesses(self, answer: AnswerSoFar) -> bool:
        """Whether an answer is asked about its likeliest tokens. Drafts need masks."""
        return self._is_guessing and followed(answer).is_greedy and not answer.draft_ids


def _fixed(answer: AnswerSoFar) -> FixedAnswer | None:
    return answer.constraint if isinstance(answer.constraint, FixedAnswer) else None
