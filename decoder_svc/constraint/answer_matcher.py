"""The state of one answer's grammar: which tokens may follow it. Runs in the process with llguidance."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Words = npt.NDArray[np.uint32]
_Result = TypeVar("_Result")

_WORD_BITS = 32
_TOO_COMPLEX = "the constraint became too complex, or has no end"
_NO_TOKEN = "no token of the vocabulary can continue the answer"
_TOO_SLOW = "the constraint takes too much processor time per token"
# Processor time that an answer may take at once, and for each mask in the long run; usual masks take 0.05 ms. Other
# requests wait for it.
_FREE_S = 0.15
_S_PER_MASK = 0.001
# Forced tokens that are drafts, times those that are forced: 4 ms for their masks.
_FORCED_WORK = 32_000


class AnswerMatcher:
    """A matcher that follows one answer. Not thread-safe.

    The tokens that end an answer are in a mask exactly where the grammar is complete. After an error, masks are empty.
    """

    def __init__(
        self,
        start: Callable[[bool], LLMatcher],
        stop_token_ids: Collection[int],
        vocab_size: int,
        control_token_ids: Collection[int] = (),
        num_tokenizer_ids: int | None = None,
    ) -> None:
        """A mask has a bit for each of `vocab_size` logits. `num_tokenizer_ids` of them are tokens; None: all.

        `start` returns a matcher in its first state: one that shares the automaton of other answers, or a new one if
        its argument is true. `control_token_ids` are no text; those that the matcher takes for the end of an answer are
        among them. `stop_token_ids`, which really end it, replace them.
        """
        self._start = start
        self._matcher = start(False)
        # The answer so far; None once its matcher shares nothing.
        self._token_ids: list[int] | None = []
        self._stop_token_ids = frozenset(stop_token_ids)
        self._control_token_ids = frozenset(control_token_ids)
        self._num_ids = vocab_size if num_tokenizer_ids is None else min(num_tokenizer_ids, vocab_size)
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._stops = _bits(stop_token_ids, self._num_words)
        self._no_ends = ~(self._stops | _bits(control_token_ids, self._num_words))
        # Processor time left, seconds.
        self._left_s = _FREE_S
        # The reason why no further token can be found, or None.
        self.error: str | None = None
        # Processor time of the last mask, seconds.
        self.mask_s = 0.0

    def forced(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Reads an answer's next tokens, and returns at most `num_tokens` about which the grammar leaves no choice.

        They are split as the tokenizer splits them. The same text may have other tokens, which the model may prefer.
        """
        return self._again_alone(token_ids, lambda new_ids: self._forced(new_ids, num_tokens))

    def masks(self, token_ids: Sequence[int], draft_ids: Sequence[int]) -> list[bytes]:
        """Reads an answer's next tokens, and returns the mask behind them and behind each draft.

        A mask has `4 * ceil(vocab_size / 32)` bytes, the bit of the first token lowest. None is returned from the first
        draft on that may not follow.
        """
        return self._again_alone(token_ids, lambda new_ids: self._masks(new_ids, draft_ids))

    def first_of(self, token_ids: Sequence[int], guess_ids: Sequence[int]) -> int | bytes | None:
        """Reads an answer's next tokens, and behind them the first guess that their mask allows; returns its index.

        If the mask allows none, or tokens are forced, the mask is returned; None after an error. To ask about one token
        takes 2 µs, and a mask 30 to 130. A token that ends the answer is not read.
        """
        (found,) = self._again_alone(token_ids, lambda new_ids: [self._first_of(new_ids, guess_ids)])
        if self.error is not None:
            return None
        if self._token_ids is not None and isinstance(found, int) and guess_ids[found] not in self._stop_token_ids:
            self._token_ids.append(guess_ids[found])
        return found

    @property
    def has_forced(self) -> bool:
        """Whether tokens are forced behind what was read."""
        return self.error is None and bool(self._matcher.compute_ff_tokens())

    def _again_alone(self, token_ids: Sequence[int], ask: Callable[[Sequence[int]], list[_Result]]) -> list[_Result]:
        """Returns the answer to a question, of a new matcher if this one fails.

        The states of an automaton are bounded, and other answers with the same constraint may have used them up.
        """
        found = ask(token_ids)
        if self._token_ids is None:
            return found
        self._token_ids += token_ids
        if self.error not in (_TOO_COMPLEX, _NO_TOKEN):
            return found
        self.error, self._matcher = None, self._start(True)
        whole, self._token_ids = self._token_ids, None
        return ask(whole)

    def _forced(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        began_s = time.thread_time()
        forced = self._matcher.compute_ff_tokens() if self._has_read(token_ids) and num_tokens else []
        self._spend(began_s)
        # The mask behind each of them takes time in proportion to the text that is forced there.
        return forced[: min(num_tokens, max(1, _FORCED_WORK // max(1, len(forced))))]

    def _masks(self, token_ids: Sequence[int], draft_ids: Sequence[int]) -> list[bytes]:
        if not self._has_read(token_ids):
            return []
        found = [self._mask()]
        for draft_id in draft_ids:
            if draft_id in self._stop_token_ids or not _has(found[-1], draft_id):
                break
            began_s = time.thread_time()
            if not self._matcher.consume_token(draft_id):
                # Its mask allowed the draft, which would be accepted, and the answer would go on without a constraint.
                self.error = _TOO_COMPLEX
                return []
            self._spend(began_s)
            found.append(self._mask())
            if self.error is not None:
                return []
        began_s = time.thread_time()
        if len(found) > 1 and not self._matcher.rollback(len(found) - 1):
            self.error = _TOO_COMPLEX
        self._spend(began_s)
        return [] if self.error is not None else [words.tobytes() for words in found]

    def _first_of(self, token_ids: Sequence[int], guess_ids: Sequence[int]) -> int | bytes:
        if not self._has_read(token_ids):
            return b""
        began_s = time.thread_time()
        # A mask allows only the tokenizer's split of a forced text, while the grammar can read each.
        if not self._matcher.compute_ff_tokens():
            for index, guess_id in enumerate(guess_ids):
                if self._reads(guess_id):
                    self._left_s = min(_FREE_S, self._left_s + _S_PER_MASK)
                    self._spend(began_s)
                    return index
        self._spend(began_s)
        return self._mask().tobytes()

    def _reads(self, token_id: int) -> bool:
        """Reads a token if the mask would allow it. Returns whether it would."""
        if token_id in self._stop_token_ids:
            return self._matcher.is_accepting()
        if token_id in self._control_token_ids or token_id >= self._num_ids:
            return False
        is_read = self._matcher.try_consume_tokens([token_id]) == 1
        if self._matcher.is_error():
            self.error = _TOO_COMPLEX
        return is_read

    def _has_read(self, token_ids: Sequence[int]) -> bool:
        if self.error is None and token_ids and not self._matcher.consume_tokens(list(token_ids)):
            self.error = _TOO_COMPLEX
        return self.error is None

    def _mask(self) -> Words:
        began_s = time.thread_time()
        self._left_s = min(_FREE_S, self._left_s + _S_PER_MASK)
        computed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        self.mask_s = self._spend(began_s)
        if self._matcher.is_error():
            self.error = _TOO_COMPLEX
            return np.zeros(self._num_words, dtype=np.uint32)
        num_shared = min(self._num_words, len(computed))
        words = computed[:num_shared] & self._no_ends[:num_shared]
        if num_shared < self._num_words:
            words = np.pad(words, (0, self._num_words - num_shared))
        if self._matcher.is_accepting():
            words |= self._stops
        if not words.any():
            self.error = _NO_TOKEN
        return words

    def _spend(self, began_s: float) -> float:
        """Counts the processor time since `began_s`, and returns it."""
        spent_s = time.thread_time() - began_s
        self._left_s -= spent_s
        if self._left_s < 0 and self.error is None:
            self.error = _TOO_SLOW
        return spent_s


def _bits(token_ids: Collection[int], num_words: int) -> Words:
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        if token_id < num_words * _WORD_BITS:
            words[token_id // _WORD_BITS] |= np.uint32(1 << (token_id % _WORD_BITS))
    return words


def _has(words: Words, token_id: int) -> bool:
    return bool(words[token_id // _WORD_BITS] >> np.uint32(token_id % _WORD_BITS) & np.uint32(1))
