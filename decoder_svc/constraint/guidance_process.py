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
from decoder_svc.constraint.frames import Check, Checked, Follow, Followed, Opening, Step, Vocabulary, encoded, received
from decoder_svc.constraint.grammars import Grammars, RefusedConstraintError, named_control_ids
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from lookonce.process.limited_side import end_with_owner, limited_side


class AnswerMatchers:
    """The answers that are followed, by their ids. One thread uses it."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: dict[int, AnswerMatcher] = {}

    def serve(self, connection: socket.socket) -> None:
        """Computes what is asked for, until the other side has ended."""
        while True:
            follow = received(connection, Follow)
            for answer_id in follow.ended_ids:
                self._matchers.pop(answer_id, None)
            for step in follow.steps:
                connection.sendall(encoded(self._followed(step)))

    def _followed(self, step: Step) -> Followed:
        try:
            if step.opening is not None:
                self._open(step.answer_id, step.opening)
            answer = self._matchers[step.answer_id]
            forced, masks = [], []
            if step.num_forced:
                forced = answer.forced(step.token_ids, step.num_forced)
            else:
                masks = answer.masks(step.token_ids, step.draft_ids)
        except RefusedConstraintError as error:
            # While it is opened, or compiled anew in the midst of an answer.
            return Followed(str(error), [], [])
        return Followed(answer.error, forced, masks)

    def _open(self, answer_id: int, opening: Opening) -> None:
        constraint = Constraint(ConstraintKind(opening.kind), opening.text)
        forbidden_ids = self._grammars.control_token_ids - named_control_ids(constraint)
        start = functools.partial(self._grammars.matcher, constraint)
        self._matchers[answer_id] = AnswerMatcher(start, opening.stop_token_ids, opening.num_logits, forbidden_ids)


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
