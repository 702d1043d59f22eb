"""Divides the text of an answer, as it comes, into reasoning, calls of functions and text for the user."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from decoder_svc.tools.call_reader import CallReader, Functions, reader_of_call
from decoder_svc.tools.tool import CallDelta
from decoder_svc.tools.tool_formats import CallStyle


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts around a model's reasoning."""

    begin: str
    end: str


# Qwen3, GLM-4.5 and others; Magistral.
REASONING_FORMATS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The parts that an answer may have beside text for the user."""

    # None: the model marks no reasoning.
    reasoning: ReasoningFormat | None = None
    # Whether the prompt ends with the beginning of the reasoning.
    begins_in_reasoning: bool = False
    # None: no function may be called.
    functions: Functions | None = None
    # Whether the answer ends behind its first call.
    is_single_call: bool = False
    # Whether the answer is nothing but calls. What is no call has been cut off.
    is_forced: bool = False
    # Control tokens that are read as text.
    shown_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class ReadAnswer:
    """The parts that were found in one piece of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    # Whether the answer ends here, behind its only call.
    is_ended: bool = False


class _Place(enum.Enum):
    """The part of an answer in which the reader is."""

    BEGINNING = "beginning"
    REASONING = "reasoning"
    # The reasoning or a call has just ended. White space does not count here.
    GAP = "gap"
    TEXT = "text"
    CALL = "call"


class AnswerReader:
    """Reads one answer. Text that may yet turn out to be the beginning of another part is held back."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._place = _Place.REASONING if form.begins_in_reasoning else _Place.BEGINNING
        # Text that has been read and not given out.
        self._held = ""
        self._call: CallReader | None = None
        # White space before the present call, or before those that have ended: it counts if text follows.
        self._gap = ""
        # Whether any text has been given out.
        self._has_text = False
        self._num_calls = 0
        # Whether any of the reasoning has been given out.
        self._has_reasoning = False

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def push(self, text: str) -> ReadAnswer:
        """Reads the next piece of the answer."""
        read = ReadAnswer()
        self._held += text
        while self._held and not read.is_ended and self._step(read):
            pass
        return read

    def flush(self) -> ReadAnswer:
        """Returns what was held back. Call it at the end of the answer."""
        read = ReadAnswer()
        while self._call is not None:
            self._call.flush()
            self._take_call(read)
            while self._held and self._step(read):
                pass
        if self._place is _Place.REASONING:
            self._add_reasoning(read, self._held.rstrip())
        elif self._place is _Place.GAP:
            read.text += self._held.strip()
        else:
            read.text += self._held.rstrip() if self._num_calls else self._held
        self._held = ""
        if self._form.is_forced:
            read.text = ""
        return read

    def _step(self, read: ReadAnswer) -> bool:
        """Reads a part of the held text. Returns False if more text is needed."""
        match self._place:
            case _Place.BEGINNING:
                return self._read_beginning()
            case _Place.REASONING:
                return self._read_reasoning(read)
            case _Place.GAP:
                return self._read_gap()
            case _Place.TEXT:
                return self._read_text(read)
            case _Place.CALL:
                return self._read_call(read)

    def _read_beginning(self) -> bool:
        reasoning, visible = self._form.reasoning, self._held.lstrip()
        if reasoning is not None:
            if visible.startswith(reasoning.begin):
                self._held, self._place = visible.removeprefix(reasoning.begin), _Place.REASONING
                return True
            if reasoning.begin.startswith(visible):
                return False
        if self._form.functions is not None and not visible:
            return False
        return self._begin_text(visible)

    def _begin_text(self, visible: str) -> bool:
        """Goes on behind white space with a call, if calls have no beginning of their own, or with text."""
        functions = self._form.functions
        if functions is not None and not functions.form.begin:
            opening = "[" if functions.form.style is CallStyle.PYTHON else "{"
            if visible.startswith(opening):
                self._held = visible
                self._begin_call(functions)
                return True
        self._place = _Place.TEXT
        if self._has_text:
            # A call has been cut out of the text.
            self._held = (self._gap or " ") + self._held
        self._gap = ""
        return True

    def _read_reasoning(self, read: ReadAnswer) -> bool:
        assert self._form.reasoning is not None, "only reasoning formats lead here"
        end = self._form.reasoning.end
        start = self._held.find(end)
        if start >= 0:
            self._add_reasoning(read, self._held[:start].rstrip())
            self._held, self._place = self._held[start + len(end) :], _Place.GAP
            return True
        # White space at the end waits: it counts if more follows.
        sure = len(self._held[: len(self._held) - _num_begun(self._held, end)].rstrip())
        self._add_reasoning(read, self._held[:sure])
        self._held = self._held[sure:] if self._has_reasoning else self._held[sure:].lstrip()
        return False

    def _add_reasoning(self, read: ReadAnswer, text: str) -> None:
        read.reasoning += text if self._has_reasoning else text.lstrip()
        self._has_reasoning = self._has_reasoning or bool(read.reasoning)

    def _read_gap(self) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        functions = self._form.functions
        if self._num_calls and functions is not None and not functions.form.begin:
            # Llama's models write several calls with a semicolon between them.
            self._held = self._held.removeprefix(";").lstrip()
            if not self._held:
                return False
        return self._begin_text(self._held)

    def _read_text(self, read: ReadAnswer) -> bool:
        functions = self._form.functions
        if functions is None or not functions.form.begin:
            self._give_text(read, self._held)
            self._held = ""
            return False
        begin = functions.form.begin
        start = self._held.find(begin)
        if start >= 0:
            text = self._held[:start].rstrip()
            self._give_text(read, text)
            self._gap = self._held[len(text) : start] or self._gap
            self._held = self._held[start + len(begin) :]
            self._begin_call(functions)
            return True
        sure = len(self._held[: len(self._held) - _num_begun(self._held, begin)].rstrip())
        self._give_text(read, self._held[:sure])
        self._held = self._held[sure:]
        return False

    def _give_text(self, read: ReadAnswer, text: str) -> None:
        read.text += text
        self._has_text = self._has_text or bool(text)

    def _begin_call(self, functions: Functions) -> None:
        self._call, self._place = reader_of_call(functions, self._num_calls), _Place.CALL

    def _read_call(self, read: ReadAnswer) -> bool:
        assert self._call is not None, "a call has begun"
        text, self._held = self._held, ""
        self._call.push(text)
        return self._take_call(read)

    def _take_call(self, read: ReadAnswer) -> bool:
        """Takes over what the reader of the call has found. Returns whether the call has ended."""
        call = self._call
        assert call is not None, "a call has begun"
        for delta in call.deltas:
            self._num_calls = max(self._num_calls, delta.index + 1)
            if not (self._form.is_single_call and delta.index > 0):
                read.calls.append(delta)
        call.deltas.clear()
        if call.rest is None:
            return False
        self._call = None
        self._held = call.rest + self._held
        if call.is_refused:
            # The mark was text, and what follows is text up to the next one.
            self._give_text(read, self._gap + call.functions.form.begin)
            self._gap, self._place = "", _Place.TEXT
            return True
        self._place = _Place.GAP
        read.is_ended = self._form.is_single_call
        return True


def _num_begun(text: str, mark: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a mark."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0
