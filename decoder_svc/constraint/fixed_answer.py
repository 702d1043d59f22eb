"""Answers whose tokens are given. The model says how likely they are. No process is needed to follow them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint, ConstraintFollower
from lookonce.errors import LookonceError

_WORD_BYTES = 4


def fixed_tokens(token_ids: Sequence[int]) -> str:
    """Returns the text of a constraint for these tokens."""
    return json.dumps(list(token_ids))


class FixedAnswer:
    """One answer that begins with given tokens (TokenConstraint). Behind them, any token may come."""

    def __init__(
        self, follower: ConstraintFollower, constraint: Constraint, num_prompt_tokens: int, num_logits: int
    ) -> None:
        """A mask has a bit for each of `num_logits` tokens."""
        self.follower = follower
        self.error: LookonceError | None = None
        self._token_ids: list[int] = json.loads(constraint.text)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_bytes = _WORD_BYTES * -(-num_logits // (8 * _WORD_BYTES))

    def forced(self, answer: AnswerSoFar, num_tokens: int) -> list[int]:
        """Returns at most `num_tokens` of the given tokens that come next."""
        start = len(answer.token_ids) - self._num_prompt_tokens
        return self._token_ids[start : start + num_tokens]

    def masks(self, answer: AnswerSoFar) -> list[bytes]:
        """Returns the mask behind the answer and behind each draft."""
        start = len(answer.token_ids) - self._num_prompt_tokens
        return [self._mask(start + index) for index in range(1 + len(answer.draft_ids))]

    def _mask(self, index: int) -> bytes:
        if index >= len(self._token_ids):
            return b"\xff" * self._num_bytes
        token_id = self._token_ids[index]
        mask = bytearray(self._num_bytes)
        mask[token_id // 8] = 1 << (token_id % 8)
        return bytes(mask)
