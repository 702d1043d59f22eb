"""Reads one call, or one list of calls, from a text that comes piece by piece."""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never

from decoder_svc.tools.call_values import NoCallError, json_of, marked_call, python_calls, tagged_call
from decoder_svc.tools.json_scanner import JsonScanner
from decoder_svc.tools.tool import CallDelta
from decoder_svc.tools.tool_formats import CallStyle, ToolFormat

# The templates of Mistral take ids of this form only.
_ID_LENGTH = 9
_ID_CHARS = string.ascii_letters + string.digits
# Longest beginning of a call, up to its arguments.
_MAX_HEAD_CHARS = 1024
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9._-]+)"\s*,\s*"(\w+)"\s*:\s*(?=\{)')
# Models confuse the two.
_ARGUMENT_KEYS = ("arguments", "parameters")
_NAME = re.compile(r"\s*([A-Za-z0-9._-]+)\s*")
# Between the name and the arguments Mistral's models may write an id.
_CALL_ID = "[CALL_ID]"


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions that an answer may call, and the form in which it does."""

    form: ToolFormat
    # By function and argument, the JSON types that the value may have; empty: any.
    types: Mapping[str, Mapping[str, frozenset[str]]]

    def __contains__(self, name: str) -> bool:
        return name in self.types


class CallReader(ABC):
    """Reads what follows the beginning of a call.

    Text that is no call of a known function is refused, unless parts of its arguments have been given out.
    """

    def __init__(self, functions: Functions, index: int) -> None:
        """`index` is that of the next call in its answer."""
        self.functions = functions
        # Parts of calls that nobody has taken yet.
        self.deltas: list[CallDelta] = []
        # Set at the end: the text behind the call, or all text if this is no call.
        self.rest: str | None = None
        self.is_refused = False
        self._index = index
        # The text so far. Arguments that have been given out are not in it.
        self._text = ""

    def push(self, text: str) -> None:
        """Reads the next piece of the answer."""
        self._text += text
        self._read()

    def flush(self) -> None:
        """Ends a call that the answer's end has cut off, or that nothing but the answer's end ends."""
        if self.rest is None:
            self._end_answer()

    @abstractmethod
    def _read(self) -> None:
        """Reads the text as far as it is certain."""

    def _end_answer(self) -> None:
        """Ends the call where the answer ends."""
        self._refuse()

    def _give(self, name: str, arguments: str) -> None:
        self.deltas.append(CallDelta(self._index, arguments, _new_id(), name))
        self._index += 1

    def _give_all(self, calls: Sequence[tuple[str, str]], end: int) -> None:
        """Gives out whole calls that end at an index of the text, or refuses them if one has an unknown function."""
        if not all(name in self.functions for name, _ in calls):
            self._refuse()
            return
        for name, arguments in calls:
            self._give(name, arguments)
        self.rest = self._text[end:]

    def _refuse(self) -> None:
        self.is_refused, self.rest = True, self._text


class _JsonReader(CallReader):
    """A call whose arguments are JSON. They go out as they come, if the name is before them."""

    def __init__(self, functions: Functions, index: int) -> None:
        super().__init__(functions, index)
        # Whether the arguments go out as they come; the text then begins with what has not gone out.
        self._is_streaming = False
        self._is_given = False
        # Length of the text that the scanner has read, and the index behind the last bracket in it.
        self._num_scanned = 0
        self._json_end: int | None = None
        self._scanner = JsonScanner()

    def _read(self) -> None:
        if not self._is_streaming and not self._may_be_call():
            return
        self._scan()
        if self._json_end is not None:
            self._end_json(is_last=False)
        elif self._is_streaming:
            self._give_out(len(self._text))

    def _end_answer(self) -> None:
        if self._json_end is not None:
            self._end_json(is_last=True)
        elif self._is_streaming:
            # Its arguments are incomplete, as is the answer.
            self.rest = ""
        else:
            self._refuse()

    def _may_be_call(self) -> bool:
        """Looks for the name before the arguments. Returns False if more text is needed, or the call is refused."""
        visible = self._text.lstrip()[:1]
        if visible not in ("", "{"):
            self._refuse()
        elif visible and self._num_scanned <= _MAX_HEAD_CHARS:
            head = _HEAD.match(self._text)
            if head is not None and head[2] in _ARGUMENT_KEYS and head[1] in self.functions:
                self._begin(head[1], head.end())
        return visible == "{"

    def _begin(self, name: str, arguments_start: int) -> None:
        self.deltas.append(CallDelta(self._index, "", _new_id(), name))
        self._is_streaming = True
        # The scanner reads the arguments alone.
        self._text, self._scanner, self._num_scanned = self._text[arguments_start:], JsonScanner(), 0

    def _scan(self) -> None:
        if self._json_end is None:
            end = self._scanner.end_in(self._text[self._num_scanned :])
            if end is not None:
                self._json_end = self._num_scanned + end
            self._num_scanned = len(self._text)

    def _give_out(self, count: int) -> None:
        """Gives out the next characters of the arguments."""
        if count:
            self.deltas.append(CallDelta(self._index, self._text[:count]))
        self._text, self._num_scanned = self._text[count:], self._num_scanned - count

    def _end_json(self, *, is_last: bool) -> None:
        """Ends behind the JSON and the form's own end, if the text goes on with it."""
        assert self._json_end is not None, "the JSON has ended"
        if self._is_streaming:
            self._give_out(self._json_end)
            self._json_end = 0
            end = self._end_of_object()
            if end is None:
                self.rest = "" if is_last else None
                return
        else:
            end = self._json_end
        behind, mark = self._text[end:].lstrip(), self.functions.form.end
        if not is_last and len(behind) < len(mark) and mark.startswith(behind):
            return
        if not self._is_streaming and not self._is_given:
            try:
                self._give(*_call_in(_json(self._text[:end]), self.functions))
            except (ValueError, RecursionError):
                self._refuse()
                return
            self._is_given = True
        self.rest = behind.removeprefix(mark)

    def _end_of_object(self) -> int | None:
        """Returns the index behind the object around the arguments, which have ended; None: it goes on."""
        return JsonScanner(depth=1).end_in(self._text)


class _NamedJsonReader(_JsonReader):
    """A call whose name stands before the arguments, without an object around both."""

    def _may_be_call(self) -> bool:
        separator = self.functions.form.separator
        head, _, behind = self._text.partition(separator)
        name = _NAME.fullmatch(head.partition(_CALL_ID)[0])
        arguments = behind.lstrip()
        if name is not None and name[1] in self.functions and arguments.startswith("{"):
            self._begin(name[1], len(self._text) - len(arguments))
            return True
        if arguments or len(self._text) > _MAX_HEAD_CHARS:
            self._refuse()
        return False

    def _end_of_object(self) -> int | None:
        return 0


class _JsonListReader(CallReader):
    """A list of calls as JSON objects. Each is read as a call by itself."""

    def __init__(self, functions: Functions, index: int) -> None:
        super().__init__(functions, index)
        self._inner: _JsonReader | None = None
        self._has_calls = False
        # The bracket, with white space before it.
        self._opening = ""

    def _read(self) -> None:
        if self._inner is None:
            visible = self._text.lstrip()
            if visible[:1] not in ("", "["):
                self._refuse()
                return
            if visible:
                self._opening = self._text.removesuffix(visible[1:])
                self._next(visible[1:])
        else:
            text, self._text = self._text, ""
            self._inner.push(text)
        while self._inner is not None and self._take():
            pass

    def _end_answer(self) -> None:
        if self._inner is not None:
            self._inner.flush()
            self._take()
        if self._has_calls:
            # The list is incomplete, as is the answer.
            self.rest = ""
        elif self.rest is None:
            self._refuse()

    def _next(self, text: str) -> None:
        """Begins to read a call."""
        self._inner = _JsonReader(self.functions, self._index)
        self._text = ""
        self._inner.push(text)

    def _take(self) -> bool:
        """Takes over what was found of a call. Returns whether the next one has been begun."""
        inner = self._inner
        assert inner is not None, "a call has been begun"
        self.deltas += inner.deltas
        self._has_calls = self._has_calls or bool(inner.deltas)
        inner.deltas.clear()
        if inner.rest is None:
            return False
        if inner.is_refused:
            self._inner = None
            if self._has_calls:
                self.rest = inner.rest
            else:
                self._text = self._opening + inner.rest
                self._refuse()
            return False
        behind = inner.rest.lstrip()
        if not behind:
            # The comma or the end of the list is still to come.
            inner.rest = None
            return False
        self._index += 1
        self._inner = None
        if behind[0] == ",":
            self._next(behind[1:])
            return True
        self.rest = behind.removeprefix("]")
        return False


class _TextReader(CallReader):
    """A call between two marks, whose arguments are not JSON. A text in it may look like the second mark."""

    def __init__(self, functions: Functions, index: int) -> None:
        super().__init__(functions, index)
        self._num_searched = 0

    def _read(self) -> None:
        form = self.functions.form
        while (end := self._text.find(form.end, self._num_searched)) >= 0:
            self._num_searched = end + len(form.end)
            body = self._text[:end]
            try:
                is_tagged = form.style is CallStyle.TAGS
                call = tagged_call(body, form, self.functions.types) if is_tagged else marked_call(body, form)
            except NoCallError:
                continue
            self._give_all([call], self._num_searched)
            return
        self._num_searched = max(0, len(self._text) - len(form.end) + 1, self._num_searched)


class _PythonReader(CallReader):
    """A list of calls in Python. Texts between single quotation marks hide its end, so it is the whole answer."""

    def _read(self) -> None:
        """Waits for the answer's end."""

    def _end_answer(self) -> None:
        try:
            calls = python_calls(self._text)
        except NoCallError:
            self._refuse()
        else:
            self._give_all(calls, len(self._text))


_READERS: Mapping[CallStyle, type[CallReader]] = {
    CallStyle.JSON: _JsonReader,
    CallStyle.NAME_AND_JSON: _NamedJsonReader,
    CallStyle.JSON_LIST: _JsonListReader,
    CallStyle.TAGS: _TextReader,
    CallStyle.MARKED: _TextReader,
    CallStyle.PYTHON: _PythonReader,
}


def reader_of_call(functions: Functions, index: int) -> CallReader:
    """Returns a reader of the call, or of the list of calls, with this index in its answer."""
    return _READERS[functions.form.style](functions, index)


def _call_in(value: object, functions: Functions) -> tuple[str, str]:
    """Returns name and arguments of a call as JSON. Raises NoCallError."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in functions:
        raise NoCallError
    given = [value[key] for key in _ARGUMENT_KEYS if key in value]
    # If calls have no mark, an object with other keys is an answer in JSON.
    if not functions.form.begin and (len(given) != 1 or value.keys() - {"name", "type", "id", *_ARGUMENT_KEYS}):
        raise NoCallError
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        # Some models write the arguments as a text that is JSON.
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise NoCallError
    return name, json_of(arguments)


def _json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Never:
    raise NoCallError(name)


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
