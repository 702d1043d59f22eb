"""The process with llguidance, which ConstraintProcess starts with `python -m`. frames.py has what both sides send.

A constraint is hostile input to a large library that is compiled as native code. Some end their process by a stack that
is too small (llguidance 1.9: 1,600 references in a row), others take minutes or gigabytes.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import sys
import threading
from collections.abc import Callable

from decoder_svc.constraint.answer_matcher import AnswerMatcher
from decoder_svc.constraint.frames import (
    Check,
    Checked,
    Follow,
    Followed,
    Forced,
    Opening,
    Step,
    Vocabulary,
    encoded,
    received,
)
from decoder_svc.constraint.grammars import Grammars, named_control_ids
from decoder_svc.constraint.mask_numbers import MaskNumbers
from decoder_svc.constraint.refusals import RefusedConstraintError
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from lookonce.process.limited_side import end_with_owner, limited_side


class AnswerMatchers:
    """The answers that are followed, by their ids. One thread uses it."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: dict[int, AnswerMatcher] = {}

    def serve(self, connection: socket.socket) -> None:
        """Computes what is asked for, until the other side has ended."""
        numbers = MaskNumbers()
        while True:
            follow = received(connection, Follow)
            for answer_id in follow.ended_ids:
                self._matchers.pop(answer_id, None)
            outbox = _Outbox(connection, follow.is_careful)
            steps = self._forced(follow, outbox) if follow.num_forced else follow.steps
            for step in steps:
                outbox.add(self._followed(step, numbers))
            outbox.flush()

    def _forced(self, follow: Follow, outbox: _Outbox) -> list[Step]:
        """Sends forced tokens, and returns the steps whose masks are wanted, with these tokens as their drafts."""
        steps, num_left = [], follow.num_forced
        for step in follow.steps:
            try:
                answer = self._opened(step)
                token_ids = answer.forced(step.token_ids, num_left)
                error = answer.error
            except RefusedConstraintError as refusal:
                # While it is opened, or compiled anew in the midst of an answer.
                token_ids, error = [], str(refusal)
            outbox.add(Forced(error, token_ids))
            num_left -= len(token_ids)
            if error is None and (token_ids or step.wants_mask):
                steps.append(Step(step.answer_id, None, [], token_ids))
        outbox.flush()
        return steps

    def _followed(self, step: Step, numbers: MaskNumbers) -> Followed:
        try:
            answer = self._opened(step)
            if step.guess_ids:
                found = answer.first_of(step.token_ids, step.guess_ids)
                if isinstance(found, int):
                    return Followed(answer.error, [], {}, found, answer.has_forced)
                masks = [] if found is None else [found]
            else:
                masks = answer.masks(step.token_ids, step.draft_ids)
        except RefusedConstraintError as error:
            return Followed(str(error), [], {})
        new_masks: dict[int, bytes] = {}
        of_masks = [numbers.number(mask, new_masks) for mask in masks]
        return Followed(answer.error, of_masks, new_masks, mask_s=answer.mask_s)

    def _opened(self, step: Step) -> AnswerMatcher:
        if step.opening is not None:
            self._open(step.answer_id, step.opening)
        return self._matchers[step.answer_id]

    def _open(self, answer_id: int, opening: Opening) -> None:
        constraint = Constraint(ConstraintKind(opening.kind), opening.text)
        forbidden_ids = self._grammars.control_token_ids - named_control_ids(constraint)
        start = functools.partial(self._grammars.matcher, constraint)
        num_ids = self._grammars.tokenizer.vocab_size
        self._matchers[answer_id] = AnswerMatcher(
            start, opening.stop_token_ids, opening.num_logits, forbidden_ids, num_ids
        )


class _Outbox:
    """Sends outcomes: together, or each at once."""

    def __init__(self, connection: socket.socket, is_careful: bool) -> None:
        self._connection = connection
        self._is_careful = is_careful
        self._frames: list[bytes] = []

    def add(self, outcome: Forced | Followed) -> None:
        """Takes an outcome, and sends it if each is sent at once."""
        self._frames.append(encoded(outcome))
        if self._is_careful:
            self.flush()

    def flush(self) -> None:
        """Sends the outcomes that have not been sent."""
        self._connection.sendall(b"".join(self._frames))
        self._frames.clear()


def check_all(connection: socket.socket, grammars: Grammars) -> None:
    """Compiles the constraints that are asked about, until the other side has ended."""
    while True:
        check = received(connection, Check)
        refusal: str | None = None
        try:
            grammars.check(Constraint(ConstraintKind(check.kind), check.text))
        except RefusedConstraintError as error:
            refusal = str(error)
        connection.sendall(encoded(Checked(refusal)))


def main() -> None:
    """Runs the process. Arguments: SOCKETS MEMORY_BYTES STACK_BYTES."""
    numbers, memory_bytes, stack_bytes = sys.argv[1:]
    with limited_side(numbers, int(memory_bytes)) as (first, checks, follows):
        vocabulary = received(first, Vocabulary)
        try:
            grammars = Grammars(vocabulary)
        except ValueError as error:
            first.sendall(encoded(Checked(str(error))))
            return
        first.sendall(encoded(Checked(None)))
        end_with_owner(first)
        answers = AnswerMatchers(grammars)
        threading.stack_size(int(stack_bytes))
        for work in (lambda: check_all(checks, grammars), lambda: answers.serve(follows)):
            threading.Thread(target=_run, args=[work], daemon=True).start()
        # The other side sends nothing more. When it ends, nobody waits for what is being computed.
        select.select([first], [], [])
        os._exit(0)


def _run(work: Callable[[], None]) -> None:
    """Runs the work of one socket. Its first failure ends the process, which tells the other side."""
    try:
        work()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
