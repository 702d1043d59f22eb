"""The state of one request's grammar: which tokens may follow its answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from decoder_svc.scheduling.sampling_params import TokenIds

Words = npt.NDArray[np.uint32]

_WORD_BITS = 32
_TOO_COMPLEX = "the constraint became too complex, or has no end"
_NO_TOKEN = "no token of the vocabulary can continue the answer"


class AnswerConstraint:
    """A matcher that follows one answer (TokenConstraint). Not thread-safe.

    The tokens that end an answer are in a mask exactly where the grammar is complete.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_prompt_tokens: int,
        stop_token_ids: Collection[int],
        vocab_size: int,
        end_token_ids: Collection[int] = (),
    ) -> None:
        """Takes over `matcher`, in its first state. A mask has a bit for each of `vocab_size` logits.

        `end_token_ids` are those that the matcher takes for the end of an answer. `stop_token_ids`, which really end
        it, replace them.
        """
        self._matcher = matcher
        # Tokens of prompt and answer that the matcher has read.
        self._num_read = num_prompt_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._stops = _bits(stop_token_ids, self._num_words)
        self._no_ends = ~(self._stops | _bits(end_token_ids, self._num_words))
        self._all = b"\xff" * (4 * self._num_words)
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        """The reason why no further token can be found, or None."""
        return self._error

    def forced(self, token_ids: TokenIds, num_tokens: int) -> list[int]:
        """Returns at most `num_tokens` tokens that the grammar leaves no choice about, by the tokenizer's own split."""
        if not self._read(token_ids):
            return []
        return self._matcher.compute_ff_tokens()[:num_tokens]

    def masks(self, token_ids: TokenIds, draft_ids: Sequence[int]) -> list[bytes]:
        """Returns the masks behind `token_ids` and behind each draft, `4 * ceil(vocab_size / 32)` bytes each."""
        if not self._read(token_ids):
            return [self._all] * (len(draft_ids) + 1)
        found = [self._mask()]
        for draft_id in draft_ids:
            if draft_id in self._stop_token_ids or not _has(found[-1], draft_id):
                break
            if not self._matcher.consume_token(draft_id):
                break
            found.append(self._mask())
        if len(found) > 1 and not self._matcher.rollback(len(found) - 1):
            self._fail()
        if self._error is not None:
            return [self._all] * (len(draft_ids) + 1)
        return [*(words.tobytes() for words in found), *[self._all] * (len(draft_ids) + 1 - len(found))]

    def _read(self, token_ids: TokenIds) -> bool:
        """Gives the matcher the tokens that it has not read. Returns False if the constraint has failed."""
        if self._error is None and self._num_read < len(token_ids):
            new = [int(token_id) for token_id in token_ids[self._num_read :]]
            self._num_read = len(token_ids)
            if not self._matcher.consume_tokens(new):
                self._fail()
        return self._error is None

    def _mask(self) -> Words:
        words = np.zeros(self._num_words, dtype=np.uint32)
        computed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        shared = min(len(words), len(computed))
        words[:shared] = computed[:shared]
        if self._matcher.is_error():
            self._fail()
            return words
        words &= self._no_ends
        if self._matcher.is_accepting():
            words |= self._stops
        if not words.any():
            self._error = _NO_TOKEN
        return words

    def _fail(self) -> None:
        self._error = _TOO_COMPLEX


def _bits(token_ids: Collection[int], num_words: int) -> Words:
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        if token_id >= num_words * _WORD_BITS:
            continue
        words[token_id // _WORD_BITS] |= np.uint32(1 << (token_id % _WORD_BITS))
    return words


def _has(words: Words, token_id: int) -> bool:
    return bool(words[token_id // _WORD_BITS] >> np.uint32(token_id % _WORD_BITS) & np.uint32(1))
