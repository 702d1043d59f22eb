"""Follows the answers of an engine's requests in a process of its own, and survives that process.

The state of an answer's grammar is a matter of its constraint and its tokens, which the engine has. So when the process
ends, for whatever reason, a new one gets both, and no answer is lost. An answer that was being computed while two
processes ended is the reason, and its request ends.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import msgspec

from decoder_svc.constraint.constraint_checker import field_of
from decoder_svc.constraint.constraint_process import ConstraintProcess
from decoder_svc.constraint.fixed_answer import FixedAnswer
from decoder_svc.constraint.frames import Follow, Followed, Opening, Step, Vocabulary, encoded, received
from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint, ConstraintKind
from lookonce.errors import InvalidParameterError, LookonceError, UnavailableError
from lookonce.logs import get_logger
from lookonce.process.process_clock import ProcessClock, TimeLimits

_STACK_BYTES = 16 << 20
# Processor time of the process for one question, seconds, and for each mask in it. It is far above what an answer may
# take by its own limits; a step that a hanging process holds up ends after this time.
_CPU_S = 3.0
_CPU_S_PER_MASK = 0.05
_WALL_S = 30.0
# A process that waits for a question takes it at once.
_SEND_TIMEOUT_S = 5.0
# Processes that may end during one question by another reason than an answer.
_MAX_DEATHS_OF_OTHERS = 3
# Processes that an answer may end.
_MAX_DEATHS = 2
# Processor time to compile a constraint for the second time.
_COMPILE_LIMITS = TimeLimits(cpu_s=10.0, wall_s=30.0)

_log = get_logger(__name__)


class FollowedAnswer:
    """One answer that is followed (TokenConstraint)."""

    def __init__(
        self,
        follower: AnswerFollower,
        answer_id: int,
        constraint: Constraint,
        num_prompt_tokens: int,
        stop_token_ids: Collection[int],
        num_logits: int,
    ) -> None:
        self.follower = follower
        self.answer_id = answer_id
        self.constraint = constraint
        self.error: LookonceError | None = None
        self._num_prompt_tokens = num_prompt_tokens
        self._opening = Opening(constraint.kind.value, constraint.text, sorted(stop_token_ids), num_logits)
        # The process that knows the answer, and the number of tokens of prompt and answer that it has read.
        self._process: ConstraintProcess | None = None
        self._num_read = num_prompt_tokens
        self._num_deaths = 0

    def step(self, process: ConstraintProcess, answer: AnswerSoFar, num_forced: int) -> Step:
        """Returns what the process does not know yet of this answer, with a question about it."""
        opening = None
        if self._process is not process:
            opening = self._opening
            self._process, self._num_read = process, self._num_prompt_tokens
        new_ids = [int(token_id) for token_id in answer.token_ids[self._num_read :]]
        self._num_read += len(new_ids)
        return Step(self.answer_id, opening, new_ids, [int(token_id) for token_id in answer.draft_ids], num_forced)

    def note_death(self) -> None:
        """Notes that a process ended while it computed something for this answer."""
        self._num_deaths += 1
        if self._num_deaths >= _MAX_DEATHS:
            self.fail("following it needs too much memory or time; simplify it")

    def fail(self, reason: str) -> None:
        """Sets the error by which the request must end."""
        self.error = InvalidParameterError(field_of(self.constraint), f"the answer cannot go on: {reason}")


class AnswerFollower:
    """Follows answers (ConstraintFollower). The engine's thread asks; one other thread may call `prepare`."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], num_logits: int) -> None:
        """A mask has a bit for each of `num_logits` tokens. `load_vocabulary` is called before the first answer."""
        self._load_vocabulary = load_vocabulary
        self._num_logits = num_logits
        self._all = b"\xff" * (4 * -(-num_logits // 32))
        self._process: ConstraintProcess | None = None
        self._is_closed = False
        self._starting = threading.Lock()
        self._ids = itertools.count()
        # Ids of answers that nobody asks about any more, for the process to forget.
        self._ended_ids: deque[int] = deque()
        self._question: _Question | None = None

    def prepare(self, constraint: Constraint) -> None:
        """Starts the process if there is none, and compiles a constraint that has been checked, ahead of its answer.

        Raises InvalidParameterError if it is refused after all, and what starting a process raises. Where the process
        ends, the answer will tell.
        """
        if constraint.kind is ConstraintKind.FIXED_TOKENS:
            return
        process = self.running()
        clock = ProcessClock(process.pid, _COMPILE_LIMITS)
        try:
            refusal = process.check(constraint, clock.wait_s)
        except (EOFError, OSError):
            self.end(process)
            return
        if refusal is not None:
            raise InvalidParameterError(field_of(constraint), refusal)

    def follow(
        self, constraint: Constraint, num_prompt_tokens: int, stop_token_ids: Collection[int]
    ) -> FollowedAnswer | FixedAnswer:
        """Begins an answer behind a prompt. `stop_token_ids` end it."""
        if constraint.kind is ConstraintKind.FIXED_TOKENS:
            return FixedAnswer(self, constraint, num_prompt_tokens, self._num_logits)
        answer = FollowedAnswer(self, next(self._ids), constraint, num_prompt_tokens, stop_token_ids, self._num_logits)
        weakref.finalize(answer, self._ended_ids.append, answer.answer_id)
        return answer

    def forced(self, answers: Sequence[AnswerSoFar], num_tokens: int) -> list[list[int]]:
        """Returns the tokens that grammars leave no choice about, as ConstraintFollower says."""
        followed = [answer for answer in answers if _fixed(answer) is None]
        found = iter(self._ask(followed, num_tokens).result())
        return [
            _forced_ids(next(found)) if fixed is None else fixed.forced(answer, num_tokens)
            for answer in answers
            for fixed in [_fixed(answer)]
        ]

    def begin_masks(self, answers: Sequence[AnswerSoFar]) -> Callable[[], list[list[bytes]]]:
        """Begins to compute masks, as ConstraintFollower says."""
        followed = [answer for answer in answers if _fixed(answer) is None]
        question = self._ask(followed, 0)

        def masks() -> list[list[bytes]]:
            found = iter(question.result())
            return [
                self._filled(next(found), answer) if fixed is None else fixed.masks(answer)
                for answer in answers
                for fixed in [_fixed(answer)]
            ]

        return masks

    def close(self) -> None:
        """Ends the process. Answers cannot be followed any more."""
        self._is_closed = True
        with self._starting:
            process = self._process
        if process is not None:
            self.end(process)

    def running(self) -> ConstraintProcess:
        """Returns the process, and starts it if there is none. Raises what starting a process raises."""
        with self._starting:
            process = self._process
            if process is not None and not process.has_ended:
                return process
            if self._is_closed:
                raise UnavailableError("the server stops")
            if process is not None:
                process.close()
            self._process = None
            self._process = ConstraintProcess(self._load_vocabulary(), _STACK_BYTES)
            return self._process

    def end(self, process: ConstraintProcess) -> None:
        """Ends a process; the next question starts a new one."""
        with self._starting:
            if self._process is process:
                self._process = None
        process.close()

    def take_ended_ids(self) -> list[int]:
        """Returns the ids of answers that the process can forget, once."""
        return [self._ended_ids.popleft() for _ in range(len(self._ended_ids))]

    def _ask(self, answers: Sequence[AnswerSoFar], num_forced: int) -> _Question:
        if self._question is not None:
            # Nobody has read its outcome, which must not be taken for the next one's.
            self._question.give_up()
        self._question = _Question(self, answers, num_forced)
        return self._question

    def _filled(self, outcome: Followed | None, answer: AnswerSoFar) -> list[bytes]:
        masks = [] if outcome is None else outcome.masks
        return [*masks, *[self._all] * (1 + len(answer.draft_ids) - len(masks))]


class _Question:
    """A question about answers, which is asked again until all of them have an outcome."""

    def __init__(self, follower: AnswerFollower, answers: Sequence[AnswerSoFar], num_forced: int) -> None:
        """Sends it to the process, whose outcomes `result` waits for. `num_forced`: as in Step."""
        self._follower = follower
        self._answers = answers
        self._num_forced = num_forced
        self._outcomes: list[Followed | None] = [None] * len(answers)
        # Indices of the answers without an outcome, in order.
        self._open = deque(index for index, answer in enumerate(answers) if _followed(answer).error is None)
        self._num_deaths_of_others = 0
        self._process: ConstraintProcess | None = None
        self._send()

    def result(self) -> list[Followed | None]:
        """Waits for the outcomes: one per answer, None for one with an error. Never raises."""
        clock: ProcessClock | None = None
        while self._open:
            process = self._process
            assert process is not None, "without a process, nothing is open"
            clock = clock or self._clock(process)
            try:
                outcome = received(process.follow_socket, Followed, clock.wait_s)
            except (EOFError, OSError, msgspec.DecodeError) as failure:
                self._note_death(process, isinstance(failure, TimeoutError), clock.is_cpu_used_up)
                self._send()
                clock = None
                continue
            index = self._open.popleft()
            self._outcomes[index] = outcome
            if outcome.error is not None:
                _followed(self._answers[index]).fail(outcome.error)
        return self._outcomes

    def give_up(self) -> None:
        """Ends the process if outcomes are still to come."""
        if self._open and self._process is not None:
            self._follower.end(self._process)

    def _send(self) -> None:
        """Sends what is open to a process. If that fails, so does the wait for the outcomes."""
        if not self._open:
            return
        try:
            self._process = process = self._follower.running()
        except LookonceError as error:
            self._fail_all(error)
            return
        asked = [self._answers[index] for index in self._open]
        steps = [_followed(answer).step(process, answer, self._num_forced) for answer in asked]
        with suppress(OSError):
            process.follow_socket.settimeout(_SEND_TIMEOUT_S)
            process.follow_socket.sendall(encoded(Follow(steps, self._follower.take_ended_ids())))

    def _note_death(self, process: ConstraintProcess, was_timeout: bool, was_cpu_used_up: bool) -> None:
        """Ends a process that ended, or took too long, and finds out whether the answer in progress was the reason."""
        is_answers_fault = was_cpu_used_up if was_timeout else not process.was_killed_from_outside()
        self._follower.end(process)
        _log.warning("the process that follows answers ended", was_crash=is_answers_fault and not was_timeout)
        if not is_answers_fault:
            self._num_deaths_of_others += 1
            if self._num_deaths_of_others >= _MAX_DEATHS_OF_OTHERS:
                self._fail_all(UnavailableError("the processes that follow structured output are killed; try again"))
            return
        answer = _followed(self._answers[self._open[0]])
        answer.note_death()
        if answer.error is not None:
            self._open.popleft()

    def _fail_all(self, error: LookonceError) -> None:
        for index in self._open:
            _followed(self._answers[index]).error = error
        self._open.clear()

    def _clock(self, process: ConstraintProcess) -> ProcessClock:
        num_masks = sum(1 + len(self._answers[index].draft_ids) for index in self._open)
        return ProcessClock(process.pid, TimeLimits(_CPU_S + _CPU_S_PER_MASK * num_masks, _WALL_S))


def _followed(answer: AnswerSoFar) -> FollowedAnswer:
    assert isinstance(answer.constraint, FollowedAnswer), "an engine has one follower"
    return answer.constraint


def _fixed(answer: AnswerSoFar) -> FixedAnswer | None:
    return answer.constraint if isinstance(answer.constraint, FixedAnswer) else None


def _forced_ids(outcome: Followed | None) -> list[int]:
    return [] if outcome is None else outcome.forced_ids
