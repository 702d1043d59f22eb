"""Constraints for the demo model's tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.constraint.answer_matcher import AnswerMatcher
from decoder_svc.constraint.folder_vocabulary import folder_vocabulary
from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.constraint.grammars import Grammars
from decoder_svc.engine.constraint_desk import ConstraintDesk
from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint
from tests.conftest import DEMO_MODEL

DEMO_VOCAB = 600
END = 2
PROMPT = [5, 6, 7]


def demo_vocabulary() -> Vocabulary:
    return folder_vocabulary(DEMO_MODEL)


def demo_grammars() -> Grammars:
    """Returns grammars that compile in this process: harmless constraints only."""
    return Grammars(demo_vocabulary())


def demo_constraints() -> ConstraintDesk:
    """Returns a desk that starts its process when the first request has a constraint."""
    return ConstraintDesk(AnswerFollower(demo_vocabulary, DEMO_VOCAB))


def masks_of(follower: AnswerFollower, answers: list[AnswerSoFar]) -> list[list[bytes]]:
    """Waits for the masks of answers that are not asked about guesses."""
    found = follower.begin_masks(answers)()
    return [masks for masks in found if masks is not None]


class WholeAnswer:
    """An AnswerMatcher that is asked with prompt and answer, as an engine asks its follower."""

    def __init__(
        self,
        grammars: Grammars,
        constraint: Constraint,
        stops: Sequence[int] = (END,),
        num_logits: int = DEMO_VOCAB,
        num_prompt_tokens: int = len(PROMPT),
    ) -> None:
        self.constraint = constraint
        start = functools.partial(grammars.matcher, constraint)
        num_ids = grammars.tokenizer.vocab_size
        self._matcher = AnswerMatcher(start, stops, num_logits, grammars.control_token_ids, num_ids)
        self._stops = stops
        self._num_read = num_prompt_tokens

    @property
    def error(self) -> str | None:
        return self._matcher.error

    def forced(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        return self._matcher.forced(self._new(ids), num_tokens)

    def masks(self, ids: Sequence[int], draft_ids: Sequence[int]) -> list[bytes]:
        return self._matcher.masks(self._new(ids), draft_ids)

    def first_of(self, ids: Sequence[int], guess_ids: Sequence[int]) -> int | bytes | None:
        """The guess that is read must be appended to the answer."""
        found = self._matcher.first_of(self._new(ids), guess_ids)
        self._num_read += isinstance(found, int) and guess_ids[found] not in self._stops
        return found

    def _new(self, ids: Sequence[int]) -> list[int]:
        new = list(ids[self._num_read :])
        self._num_read = len(ids)
        return new
