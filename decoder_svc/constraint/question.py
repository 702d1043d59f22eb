"""A question about the answers of one step: which tokens are forced, and which may come next.

It is asked again, of a new process, until each answer has an outcome. A process that ends may have ended at any of the
answers of a question, because their outcomes come together. All of them are suspects then, and outcomes of a question
with suspects come one by one: the next process tells by its end which answer is the reason, and that answer fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from decoder_svc.constraint.constraint_process import ConstraintProcess
from decoder_svc.constraint.current_process import CurrentProcess
from decoder_svc.constraint.followed_answer import followed
from decoder_svc.constraint.frames import Follow, Followed, Forced, FrameT, encoded
from decoder_svc.scheduling.sampling_params import AnswerSoFar
from lookonce.errors import LookonceError, UnavailableError
from lookonce.logs import get_logger
from lookonce.process.process_clock import ProcessClock, TimeLimits

# Processor time of the process for one question, seconds, and for each mask in it. It is far above what an answer may
# take by its own limits; a step that a hanging process holds up ends after this time.
_CPU_S = 3.0
_CPU_S_PER_MASK = 0.05
_WALL_S = 10.0
# A process that waits for a question takes it at once.
_SEND_TIMEOUT_S = 5.0
# Processes that may end during one question by another reason than an answer.
_MAX_DEATHS_OF_OTHERS = 3
# Bytes that a socket takes although the process does not read, because it still sends.
_MAX_BYTES_AHEAD = 32 << 10

_log = get_logger(__name__)


class Question:
    """A question that has been sent. One thread waits for its outcomes."""

    def __init__(
        self,
        current: CurrentProcess,
        answers: Sequence[AnswerSoFar],
        num_forced: int,
        before: Question | None = None,
        guesses: Sequence[Sequence[int]] | None = None,
        *,
        guesses_later: bool = False,
    ) -> None:
        """Sends it.

        Args:
            num_forced: Most forced tokens of all answers together. They take the place of the answers' drafts. 0: masks
                behind the drafts are wanted.
            before: A question whose outcomes come first.
            guesses: Tokens of each answer. The first that may come next is taken, and then it has no mask.
            guesses_later: Whether greedy answers want masks only where tokens are forced.
        """
        self._current = current
        self._answers = answers
        self._num_forced = num_forced
        self._before = before
        self._guesses = guesses
        self._wants_mask = [not (guesses_later and followed(answer).is_greedy) for answer in answers]
        # The index of the guess that each answer takes.
        self._taken = [0] * len(answers)
        # The masks of each answer; None: the answer has an error, or needs none.
        self._masks: list[list[bytes] | None] = [None] * len(answers)
        # The drafts of each answer; None: they are still to be found.
        self._drafts: list[Sequence[int]] | None = None if num_forced else [answer.draft_ids for answer in answers]
        # Indices of the answers without masks, in order.
        self._open = deque(index for index, answer in enumerate(answers) if followed(answer).error is None)
        # The tokens of an answer may grow in place after the question.
        self._lengths = [len(answer.token_ids) for answer in answers]
        self._indices = {id(answer.constraint): index for index, answer in enumerate(answers)}
        self._num_deaths_of_others = 0
        self._process: ConstraintProcess | None = None
        self._clock: ProcessClock | None = None
        self._send()

    def is_at(self, process: ConstraintProcess) -> bool:
        """Whether its outcomes come from this process, or none is missing."""
        return not self._open or self._process is process

    def is_about(self, answer: AnswerSoFar) -> bool:
        """Whether it asks about this answer, with the same tokens."""
        index = self._indices.get(id(answer.constraint))
        return index is not None and self._lengths[index] == len(answer.token_ids)

    def forced_of(self, answer: AnswerSoFar) -> list[int]:
        """Waits for the forced tokens of an answer that it is about."""
        return list(self.forced()[self._indices[id(answer.constraint)]])

    def forced(self) -> list[Sequence[int]]:
        """Waits for the forced tokens of each answer: none for one with an error. Never raises."""
        found: dict[int, Sequence[int]] = {}
        waiting = deque(self._open)
        while self._drafts is None and waiting:
            outcome = self._received(Forced, waiting[0])
            if outcome is None:
                waiting = deque(self._open)
                continue
            index = waiting.popleft()
            found[index] = outcome.token_ids
            if outcome.error is not None:
                followed(self._answers[index]).fail(outcome.error)
            if outcome.error is not None or not (outcome.token_ids or self._wants_mask[index]):
                self._open.remove(index)
        if self._drafts is None:
            self._drafts = [found.get(index, ()) for index in range(len(self._answers))]
            self._clock = None
        return self._drafts

    def masks(self) -> list[list[bytes] | None]:
        """Waits for the masks of each answer: None for one with an error. Never raises."""
        if self._before is not None:
            self._before.masks()
            self._before = None
        self.forced()
        while self._open:
            outcome = self._received(Followed, self._open[0])
            if outcome is None:
                continue
            index = self._open.popleft()
            assert self._process is not None, "somebody sent the outcome"
            self._masks[index] = self._process.masks(outcome)
            answer = followed(self._answers[index])
            if outcome.error is not None:
                answer.fail(outcome.error)
            elif self._guesses is not None and not outcome.masks:
                self._taken[index] = outcome.guess
                answer.note_read(is_forced=outcome.is_forced)
            else:
                answer.note_mask(outcome.mask_s)
        return self._masks

    def masks_of(self, answer: AnswerSoFar) -> list[bytes] | None:
        """Waits for the masks of an answer that it covers: None for one with an error."""
        found = self.masks()[self._indices[id(answer.constraint)]]
        return found if found is None else found[: 1 + len(answer.draft_ids)]

    def guess_or_mask(self) -> list[int | bytes]:
        """Waits for each answer's index of the guess that is taken, 0 with an error, or for the mask against all."""
        found = self.masks()
        return [masks[0] if masks else taken for masks, taken in zip(found, self._taken, strict=True)]

    def covers(self, answer: AnswerSoFar) -> bool:
        """Whether masks behind this answer and behind each of its drafts are among the outcomes."""
        if not self.is_about(answer):
            return False
        num_drafts = len(answer.draft_ids)
        if num_drafts == 0 and self._wants_mask[self._indices[id(answer.constraint)]]:
            return True
        forced_ids = self.forced_of(answer)
        return bool(forced_ids) and tuple(forced_ids[:num_drafts]) == tuple(answer.draft_ids)

    def _send(self) -> None:
        """Sends what is open to a process. If that fails, so does the wait for the outcomes."""
        self._clock = None
        if not self._open:
            return
        try:
            process = self._current.running()
            if self._before is not None and not self._before.is_at(process):
                # Its outcomes come first, so it must be asked first.
                self._before.masks()
                process = self._current.running()
            data = self._encoded(process)
            if self._before is not None and len(data) > _MAX_BYTES_AHEAD:
                self._before.masks()
        except LookonceError as error:
            self._fail_all(error)
            return
        with suppress(OSError):
            process.follow_socket.settimeout(_SEND_TIMEOUT_S)
            process.follow_socket.sendall(data)

    def _encoded(self, process: ConstraintProcess) -> bytes:
        self._process = process
        # The question before may have ended some.
        self._open = deque(index for index in self._open if followed(self._answers[index]).error is None)
        steps = []
        for index in self._open:
            step = followed(self._answers[index]).step(process, self._answers[index])
            step.wants_mask = self._wants_mask[index]
            if self._drafts is not None:
                step.draft_ids = [int(token_id) for token_id in self._drafts[index]]
            if self._guesses is not None:
                step.guess_ids = list(self._guesses[index])
            steps.append(step)
        num_forced = self._num_forced if self._drafts is None else 0
        return encoded(Follow(steps, self._current.take_ended_ids(), num_forced, self._is_careful()))

    def _is_careful(self) -> bool:
        """Whether outcomes come one by one."""
        return any(followed(self._answers[index]).is_suspect for index in self._open)

    def _received(self, frame_type: type[FrameT], index: int) -> FrameT | None:
        """Receives the outcome of an answer. Returns None if the process has ended and what is open was asked again."""
        process = self._process
        assert process is not None, "without a process, nothing is open"
        self._clock = self._clock or self._started_clock(process)
        try:
            return process.frames.next(frame_type, self._clock.wait_s)
        except (EOFError, OSError, msgspec.DecodeError) as failure:
            if self._current.is_current(process):
                self._note_death(process, index, isinstance(failure, TimeoutError), self._clock.is_cpu_used_up)
            self._send()
            return None

    def _note_death(self, process: ConstraintProcess, index: int, was_timeout: bool, was_cpu_used_up: bool) -> None:
        """Ends a process that ended, or took too long. The answer at `index` is the reason if it was computed alone."""
        is_answers_fault = was_cpu_used_up if was_timeout else not process.was_killed_from_outside()
        self._current.end(process)
        _log.warning("the process that follows answers ended", was_crash=is_answers_fault and not was_timeout)
        if not is_answers_fault:
            self._num_deaths_of_others += 1
            if self._num_deaths_of_others >= _MAX_DEATHS_OF_OTHERS:
                self._fail_all(UnavailableError("the processes that follow structured output are killed; try again"))
        elif self._is_careful():
            followed(self._answers[index]).fail("following it needs too much memory or time; simplify it")
            self._open.remove(index)
        else:
            for one in self._open:
                followed(self._answers[one]).is_suspect = True

    def _fail_all(self, error: LookonceError) -> None:
        for index in self._open:
            followed(self._answers[index]).error = error
        self._open.clear()

    def _started_clock(self, process: ConstraintProcess) -> ProcessClock:
        num_masks = self._num_forced + sum(1 + len(self._answers[index].draft_ids) for index in self._open)
        return ProcessClock(process.pid, TimeLimits(_CPU_S + _CPU_S_PER_MASK * num_masks, _WALL_S))
