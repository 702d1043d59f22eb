"""The sampling parameters of a request, with every default filled in, and the constraint on its answer."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lookonce.errors import LookonceError


class ConstraintKind(enum.Enum):
    """Languages in which a constraint is written, by the name of the contract's field."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    JSON_OBJECT = "json_object"
    CHOICE = "choice"
    # These have no field: the prompt's functions are the constraint, or the answer is given, to find its likelihood.
    TOOL_CALLS = "tool_calls"
    FIXED_TOKENS = "fixed_tokens"


class Pooling(enum.Enum):
    """Tokens of a prompt whose hidden states make its embedding."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer must have."""

    kind: ConstraintKind
    # A JSON schema, a regular expression that matches the whole answer, a grammar in Lark's notation, a JSON list of
    # the texts of which the answer is one, what tools/call_grammar.py writes, or a JSON list of ids; empty for any JSON
    # object.
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters; defaults are already filled in."""

    # 0 means greedy decoding.
    temperature: float = 0.0
    top_p: float = 1.0
    # None: no limit.
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # (token id, addend) pairs; -inf for tokens that the model must not generate.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Most tokens to generate.
    max_tokens: int = 256
    # Generated tokens that come before a stop id or a stop string.
    min_tokens: int = 0
    # The model's end-of-sequence ids (none with ignore_eos) and the request's own stop ids.
    stop_token_ids: frozenset[int] = frozenset()
    # None: the server draws a random seed.
    seed: int | None = None
    # Alternatives reported per generated token. 0: only the sampled token. None: no log probabilities.
    logprobs: int | None = None
    # The same for each token of the prompt but the first.
    prompt_logprobs: int | None = None
    # None: any text.
    constraint: Constraint | None = None
    # The hidden states that come with the first token; None: none.
    pooling: Pooling | None = None

    @property
    def num_context_tokens(self) -> int:
        """Most tokens of the answer for which the context needs room: none for an embedding."""
        return self.max_tokens if self.pooling is None else 0

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0.0

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens get a penalty."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


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

    def begin(self, answers: Sequence[AnswerSoFar], num_tokens: int) -> None:
        """Begins to compute forced tokens and masks of answers that will be asked about. The next call replaces it."""

    def forced(self, answers: Sequence[AnswerSoFar], num_tokens: int) -> list[list[int]]:
        """Returns tokens of each answer about which its grammar leaves no choice, at most `num_tokens` of each.

        They may be fewer than there are: a scheduler takes `num_tokens` of all answers together.
        They are split as the tokenizer splits them. The same text may have other tokens, which the model may prefer.
        """

    def begin_masks(self, answers: Sequence[AnswerSoFar]) -> Callable[[], list[list[bytes] | None]]:
        """Begins to compute masks, and returns a function that waits for them. No other question may come before.

        If `begin` or `forced` was asked about the same answers, their masks are being computed since.

        For each answer they are the tokens that may follow `token_ids`, and then each of the drafts. A mask has one bit
        per token of the vocabulary, the lowest bit of the first byte first, and fills whole words of four bytes. Behind
        a draft that may not follow, and after an error, every token is in the mask: nothing there is used.

        None instead of masks: the likeliest tokens are found without one, and then `check` is asked about them.
        """

    def check(self, answers: Sequence[AnswerSoFar], guesses: Sequence[Sequence[int]]) -> list[int | bytes]:
        """Returns the index of the first guess with which each answer may go on, and waits for that.

        This token must be appended to the answer. If there is none, the mask of the tokens that may follow is returned.
        For an answer with an error, the index is 0.
        """
