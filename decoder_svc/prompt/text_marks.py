"""Marks around the texts of users, by which they are found in what a chat template has written."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from decoder_svc.prompt.text_tokenizer import TextPiece
from lookonce.errors import InvalidParameterError

# Marks consist of digits only: no case filter or escaping of a template changes them.
_NONCE_DIGITS = 32
_INDEX_DIGITS = 6
# Digits at a mark's beginning or end by which a damaged mark is recognised.
_FRAGMENT_DIGITS = 10
_OPEN, _CLOSE, _WHOLE = "1", "2", "3"
# Comes before every name without marks, of which the first begins with "$", and before digits.
_BEFORE_NAMES = "#"


class _Mark(NamedTuple):
    """One mark in a rendered string, [start, stop)."""

    start: int
    stop: int
    # The text's index in digits, and the mark's kind: _OPEN, _CLOSE or _WHOLE.
    number: str
    kind: str


class TextMarks:
    """Random marks around the texts of one conversation, by which they are found in the rendered string."""

    def __init__(self, values: Iterable[str] = (), unmarked_names: Iterable[str] = ()) -> None:
        """`values` are texts that may be parts of data. The marks of equal ones are equal.

        `unmarked_names` are names of ASCII that stand in data without marks.
        """
        self._nonce = str(secrets.randbelow(9 * 10 ** (_NONCE_DIGITS - 1)) + 10 ** (_NONCE_DIGITS - 1))
        # Templates may sort by values. So the marks have the order that Jinja's filters give to their texts, and begin
        # with the name that comes before the text.
        self._texts = sorted({value.strip() for value in values}, key=lambda text: (text.lower(), text))
        names = sorted({"", *(name.lower() for name in unmarked_names)})
        self._prefixes = [names[bisect_right(names, text.lower()) - 1] or _BEFORE_NAMES for text in self._texts]
        self._index_of = {text: index for index, text in enumerate(self._texts)}
        self._num_values = len(self._texts)

    def bordered(self, text: str) -> str:
        """Returns the text with a mark before its first and after its last visible character.

        White space stays outside the marks, so that a template can still strip it.
        """
        return self._marked(text, lambda index, core: f"{self._nonce}{index}{_OPEN}{core}{self._nonce}{index}{_CLOSE}")

    def whole(self, text: str) -> str:
        """Returns the text with one mark in place of everything from its first to its last visible character."""
        return self._marked(text, lambda index, core: f"{self._nonce}{index}{_WHOLE}")

    def bordered_pieces(self, rendered: str) -> list[TextPiece] | None:
        """Splits a string rendered from bordered texts into pieces; None if a text lost a mark or a part of one.

        A template that cuts a text may also leave a piece of it without marks, so no text may be missing.
        """
        pieces: list[TextPiece] = []
        end, opened = 0, None
        missing = {f"{index:0{_INDEX_DIGITS}d}" for index in range(self._num_values, len(self._texts))}
        for mark in self._found(rendered):
            if opened != (None if mark.kind == _OPEN else mark.number):
                return None
            missing.discard(mark.number)
            pieces.append(TextPiece(rendered[end : mark.start], is_trusted=mark.kind == _OPEN))
            end, opened = mark.stop, mark.number if mark.kind == _OPEN else None
        if opened is not None or missing:
            return None
        pieces.append(TextPiece(rendered[end:], is_trusted=True))
        return None if self._has_fragments(pieces) else _non_empty(pieces)

    def whole_pieces(self, rendered: str) -> list[TextPiece]:
        """Splits a string rendered from marks in place of texts, and values between marks, into pieces.

        Raises InvalidParameterError if the template kept only a part of a mark.
        """
        pieces: list[TextPiece] = []
        end, opened = 0, None
        for mark in self._found(rendered):
            if opened != (mark.number if mark.kind == _CLOSE else None):
                raise _cut()
            pieces.append(TextPiece(rendered[end : mark.start], is_trusted=opened is None))
            if mark.kind == _WHOLE:
                pieces.append(TextPiece(self._texts[int(mark.number)], is_trusted=False))
            end, opened = mark.stop, mark.number if mark.kind == _OPEN else None
        if opened is not None:
            raise _cut()
        pieces.append(TextPiece(rendered[end:], is_trusted=True))
        if self._has_fragments(pieces):
            raise _cut()
        return _non_empty(pieces)

    def _has_fragments(self, pieces: Sequence[TextPiece]) -> bool:
        """Whether the template's text has a part of a mark."""
        fragments = (self._nonce[:_FRAGMENT_DIGITS], self._nonce[-_FRAGMENT_DIGITS:])
        return any(piece.is_trusted and fragment in piece.text for piece in pieces for fragment in fragments)

    def _found(self, rendered: str) -> Iterator[_Mark]:
        """Yields all marks in order.

        Uses no regular expression: compiling one per conversation took a third of the rendering time.
        """
        start = 0
        while (start := rendered.find(self._nonce, start)) >= 0:
            stop = start + _NONCE_DIGITS + _INDEX_DIGITS + 1
            number, kind = rendered[start + _NONCE_DIGITS : stop - 1], rendered[stop - 1 : stop]
            if number.isdecimal() and kind in (_OPEN, _CLOSE, _WHOLE):
                prefix = "" if kind == _CLOSE else self._prefix(int(number))
                begin = start - len(prefix)
                if rendered[max(begin, 0) : start].lower() == prefix:
                    yield _Mark(begin, stop, number, kind)
                start = stop
            else:
                start += 1

    def _prefix(self, index: int) -> str:
        return self._prefixes[index] if index < self._num_values else ""

    def _marked(self, text: str, mark: Callable[[str, str], str]) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.find(core)
        number = self._index_of.get(core)
        if number is None:
            number = len(self._texts)
            self._texts.append(core)
        index = f"{number:0{_INDEX_DIGITS}d}"
        return text[:start] + self._prefix(number) + mark(index, core) + text[start + len(core) :]


def _non_empty(pieces: list[TextPiece]) -> list[TextPiece]:
    return [piece for piece in pieces if piece.text]


def _cut() -> InvalidParameterError:
    return InvalidParameterError("chat.messages", "the model's chat template cuts the messages' texts")
