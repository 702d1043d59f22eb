"""One answer that a process follows, as the engine sees it."""

from __future__ import annotations

from collections.abc import Collection

from decoder_svc.constraint.constraint_checker import field_of
from decoder_svc.constraint.constraint_process import ConstraintProcess
from decoder_svc.constraint.frames import Opening, Step
from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint, ConstraintFollower
from lookonce.errors import InvalidParameterError, LookonceError


class FollowedAnswer:
    """One answer that is followed (TokenConstraint)."""

    def __init__(
        self,
        follower: ConstraintFollower,
        answer_id: int,
        constraint: Constraint,
        num_prompt_tokens: int,
        stop_token_ids: Collection[int],
        num_logits: int,
        *,
        is_greedy: bool = False,
    ) -> None:
        """`is_greedy`: the likeliest of the tokens that may come is the next one."""
        self.follower = follower
        self.answer_id = answer_id
        self.constraint = constraint
        self.is_greedy = is_greedy
        self.error: LookonceError | None = None
        # Whether it was asked about when a process ended that nobody had killed.
        self.is_suspect = False
        self._num_prompt_tokens = num_prompt_tokens
        self._opening = Opening(constraint.kind.value, constraint.text, sorted(stop_token_ids), num_logits)
        # The process that knows the answer, and the number of tokens of prompt and answer that it has read.
        self._process: ConstraintProcess | None = None
        self._num_read = num_prompt_tokens
        # The number of tokens behind which none is known to be forced.
        self._free_at = 0
        # Processor time that each of its masks takes, seconds, and that of the latest one.
        self.mask_s = self._latest_mask_s = 0.0

    def step(self, process: ConstraintProcess, answer: AnswerSoFar) -> Step:
        """Returns what the process does not know yet of this answer."""
        opening = None
        if self._process is not process:
            opening = self._opening
            self._process, self._num_read = process, self._num_prompt_tokens
        new_ids = [int(token_id) for token_id in answer.token_ids[self._num_read :]]
        self._num_read += len(new_ids)
        return Step(self.answer_id, opening, new_ids, [int(token_id) for token_id in answer.draft_ids])

    def note_mask(self, mask_s: float) -> None:
        """Notes the processor time of a mask. It is many times as long where the constraint is new to a state."""
        self.mask_s, self._latest_mask_s = min(self._latest_mask_s, mask_s), mask_s

    def note_read(self, *, is_forced: bool) -> None:
        """Notes that the process has read a token that comes next. `is_forced`: tokens behind it are forced."""
        self._num_read += 1
        self._free_at = 0 if is_forced else self._num_read

    def is_free(self, answer: AnswerSoFar) -> bool:
        """Whether it is known that no token is forced behind this answer."""
        return self._free_at == len(answer.token_ids)

    def fail(self, reason: str) -> None:
        """Sets the error by which the request must end."""
        self.error = InvalidParameterError(field_of(self.constraint), f"the answer cannot go on: {reason}")


def followed(answer: AnswerSoFar) -> FollowedAnswer:
    """Returns the constraint of an answer that is not given."""
    assert isinstance(answer.constraint, FollowedAnswer), "an engine has one follower"
    return answer.constraint
