"""Turns generated token ids into text as it becomes final: whole characters only, up to the first stop string.

Works on the text of one choice of one request. Knows neither the engine nor the wire.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decoder_svc.prompt.text_tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes. So 4 further tokens complete, or rule out, any character begun before them.
_SETTLING_TOKENS = 4
# Pending tokens above which the settled ones among them are given out, although the text still ends in U+FFFD.
_MAX_PENDING_TOKENS = 12


class IncrementalDecoder:
    """Decodes token ids one by one. The pieces together are the text of all ids.

    There is one exception, with byte-fallback vocabularies: when the last ids end in the middle of a character, this
    class gives the characters before it plus U+FFFD, while decoding all ids at once turns the whole run of byte tokens
    into U+FFFD.
    """

    def __init__(self, tokenizer: TextTokenizer, shown_token_ids: Collection[int] = ()) -> None:
        """No special token has a text, except for `shown_token_ids`."""
        self._tokenizer = tokenizer
        self._shown_ids = frozenset(shown_token_ids)
        self._hidden_ids = tokenizer.special_token_ids - self._shown_ids
        # Ids of the piece given out last. They are decoded again before the pending ids, because decoders treat the
        # first token of a text differently (its leading space).
        self._context: list[int] = []
        self._context_text = ""
        # Ids whose text has not been given out yet.
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Adds an id and returns the text that is final now, often "". Special tokens have no text."""
        if token_id in self._hidden_ids:
            return ""
        if token_id in self._shown_ids:
            return self.flush() + self._tokenizer.decode([token_id], skip_special_tokens=False)
        self._pending.append(token_id)
        text = self._text_with(self._pending)
        if not text.endswith(_REPLACEMENT):
            return self._give_out(len(self._pending), text)
        return self._give_out_settled(text) if len(self._pending) > _MAX_PENDING_TOKENS else ""

    def flush(self) -> str:
        """Returns the remaining text. Bytes that are not a whole character become U+FFFD."""
        if not self._pending:
            return ""
        return self._give_out(len(self._pending), self._text_with(self._pending))

    def _give_out_settled(self, text: str) -> str:
        """Gives out the pending ids whose text can no longer change."""
        for count in range(len(self._pending) - _SETTLING_TOKENS, 0, -1):
            settled = self._text_with(self._pending[:count])
            if text.startswith(settled):
                return self._give_out(count, settled)
        return ""

    def _give_out(self, count: int, text: str) -> str:
        """Removes `count` pending ids and returns their text. `text` is the text of the context and these ids."""
        new_text = text.removeprefix(self._context_text)
        if not text.startswith(self._context_text):
            new_text = self._tokenizer.decode(self._pending[:count], skip_special_tokens=True)
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=True)
        return new_text

    def _text_with(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode([*self._context, *token_ids], skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class FilteredText:
    """Text that has passed a stop filter."""

    text: str
    # Whether a stop string was found; nothing passes after it.
    is_stopped: bool


class StopFilter:
    """Passes text on up to the first stop string, and holds back text that may be the beginning of one.

    The first stop string is the one that is complete first, so the result does not depend on how the text is divided
    into pieces.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""

    def push(self, text: str) -> FilteredText:
        """Appends text and returns the part that passes."""
        if not self._stop_strings:
            return FilteredText(text, is_stopped=False)
        self._held += text
        start = self._first_stop()
        if start is not None:
            passed, self._held = self._held[:start], ""
            return FilteredText(passed, is_stopped=True)
        end = len(self._held) - self._num_held_back()
        passed, self._held = self._held[:end], self._held[end:]
        return FilteredText(passed, is_stopped=False)

    def flush(self) -> str:
        """Returns the text that was held back. Call it when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self) -> int | None:
        """Returns the beginning of the stop string that is complete first, or None."""
        found = [(self._held.find(stop), stop) for stop in self._stop_strings]
        ends = [(start + len(stop), start) for start, stop in found if start >= 0]
        return min(ends)[1] if ends else None

    def _num_held_back(self) -> int:
        """Returns how many characters at the end may be the beginning of a stop string."""
        longest = min(max(map(len, self._stop_strings)) - 1, len(self._held))
        for count in range(longest, 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop_strings):
                return count
        return 0
