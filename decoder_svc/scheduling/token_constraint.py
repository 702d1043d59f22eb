"""What scheduler and runner ask about answers that must have a form. Whoever follows their grammars implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lookonce.errors import LookonceError


class TokenIds(Protocol):
    """Ids of a sequence's tokens: a list, or an array of the runner."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> Iterable[int]: ...


class TokenConstraint(Protocol):
    """The state of one answer's grammar. It follows the answer: tokens may only be appended between two questions."""

    @property
    def error(self) -> LookonceError | None:
        """The reason why no further token can be found, or None. The request must end."""

    @property
    def follower(self) -> ConstraintFollower:
        """Answers questions about this answer and others of the same engine, together."""


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """An answer that is asked about."""

    constraint: TokenConstraint
    # The tokens of prompt and answer.
    token_ids: TokenIds
    draft_ids: Sequence[int] = ()


class ConstraintFollower(Protocol):
    """Follows the grammars of many answers. The engine's thread uses it."""

    def forced(self, answers: Sequence[AnswerSoFar], num_tokens: int) -> list[list[int]]:
        """Returns at most `num_tokens` tokens for each answer about which its grammar leaves no choice.

        They are split as the tokenizer splits them. The same text may have other tokens, which the model may prefer.
        """

    def begin_masks(self, answers: Sequence[AnswerSoFar]) -> Callable[[], list[list[bytes]]]:
        """Begins to compute masks, and returns a function that waits for them. No other question may come before.

        For each answer they are the tokens that may follow `token_ids`, and then each of the drafts. A mask has one bit
        per token of the vocabulary, the lowest bit of the first byte first, and fills whole words of four bytes. Behind
        a draft that may not follow, and after an error, every token is in the mask: nothing there is used.
        """
