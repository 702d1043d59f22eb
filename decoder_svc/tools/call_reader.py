"""Reads one call, or one list of calls, from a text that comes piece by piece."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
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
# First character of calls in these styles.
_FIRST = {CallStyle.JSON: "{", CallStyle.JSON_LIST: "["}
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


@dataclass(slots=True)
class CallReader:
    """Reads what follows the beginning of a call.

    What is no call of a known function is refused, unless parts of its arguments have been given out.
    """

    functions: Functions
    # Index of the next call in its answer.
    index: int
    # Parts of calls that nobody has taken yet.
    deltas: list[CallDelta] = field(default_factory=list)
    # Set at the end: the text behind the call, or all text if this is no call.
    rest: str | None = None
    is_refused: bool = False
    # The text so far. Arguments that have been given out are not in it.
    _text: str = ""
    _is_begun: bool = False
    # Whether the arguments go out as they come; `_text` then begins with what has not gone out.
    _is_streaming: bool = False
    # Length of `_text` that the scanner has read, and the index behind the last bracket in it.
    _num_scanned: int = 0
    _json_end: int | None = None
    _scanner: JsonScanner = field(default_factory=JsonScanner)

    def push(self, text: str) -> None:
        """Reads the next piece of the answer."""
        self._text += text
        style = self.functions.form.style
        if not self._is_begun:
            visible = self._text.lstrip()[:1]
            self._is_begun = bool(visible)
            if visible != _FIRST.get(style, visible):
                if visible:
                    self._refuse()
                return
        match style:
            case CallStyle.JSON | CallStyle.NAME_AND_JSON:
                self._read_json()
            case CallStyle.JSON_LIST:
                self._scan()
                if self._json_end is not None:
                    self._end_list()
            case CallStyle.PYTHON:
                # Brackets in texts between single quotation marks mislead the scanner, so the whole answer is the list.
                pass
            case CallStyle.TAGS | CallStyle.MARKED:
                end = self._text.find(self.functions.form.end)
                if end >= 0:
                    self._end_text(end, end + len(self.functions.form.end))

    def flush(self) -> None:
        """Ends a call that the answer's end has cut off, or that nothing but the answer's end ends."""
        if self.rest is not None:
            return
        if self.functions.form.style is CallStyle.PYTHON:
            self._end_text(len(self._text), len(self._text))
        elif self._json_end is not None:
            self._end_json(is_last=True)
        elif self._is_streaming:
            # Its arguments are incomplete, as is the answer.
            self.rest = ""
        else:
            self._refuse()

    def _read_json(self) -> None:
        if not self._is_streaming:
            if self.functions.form.style is CallStyle.JSON:
                self._find_head()
            elif not self._find_name():
                return
        self._scan()
        if self._is_streaming and self._json_end is None:
            self._give_out(len(self._text))
        elif self._json_end is not None:
            self._end_json()

    def _give_out(self, count: int) -> None:
        """Gives out the next characters of the arguments."""
        if count:
            self.deltas.append(CallDelta(self.index, self._text[:count]))
        self._text, self._num_scanned = self._text[count:], self._num_scanned - count

    def _find_head(self) -> None:
        """Finds the name before the arguments. The usual order of keys lets the arguments go out as they come."""
        if self._num_scanned > _MAX_HEAD_CHARS:
            return
        head = _HEAD.match(self._text)
        if head is not None and head[2] == self.functions.form.arguments_key and head[1] in self.functions:
            self._begin(head[1], head.end())

    def _find_name(self) -> bool:
        """Finds the name and the separator before the arguments. Returns whether they are there."""
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

    def _begin(self, name: str, arguments_start: int) -> None:
        self.deltas.append(CallDelta(self.index, "", _new_id(), name))
        self._is_streaming = True
        # The scanner reads the arguments alone.
        self._text, self._scanner, self._num_scanned = self._text[arguments_start:], JsonScanner(), 0

    def _scan(self) -> None:
        if self._json_end is None:
            end = self._scanner.end_in(self._text[self._num_scanned :])
            if end is not None:
                self._json_end = self._num_scanned + end
            self._num_scanned = len(self._text)

    def _end_json(self, *, is_last: bool = False) -> None:
        """Ends behind the JSON and the format's own end, if the text goes on with it."""
        assert self._json_end is not None, "the JSON has ended"
        form = self.functions.form
        if self._is_streaming:
            self._give_out(self._json_end)
            self._json_end = 0
        end = self._json_end
        if self._is_streaming and form.style is CallStyle.JSON:
            # The arguments have ended, and the object around them goes on.
            behind_object = JsonScanner(depth=1).end_in(self._text)
            if behind_object is None:
                self.rest = "" if is_last else None
                return
            end = behind_object
        behind = self._text[end:].lstrip()
        if not is_last and len(behind) < len(form.end) and form.end.startswith(behind):
            return
        rest = behind.removeprefix(form.end)
        if self._is_streaming:
            self.rest = rest
            return
        try:
            self._give(*self._call(_json(self._text[:end])))
        except (ValueError, RecursionError):
            self._refuse()
        else:
            self.rest = rest

    def _end_list(self) -> None:
        assert self._json_end is not None, "the JSON has ended"
        try:
            values = _json(self._text[: self._json_end])
            calls = [self._call(value) for value in (values if isinstance(values, list) else [values])]
        except (ValueError, RecursionError):
            self._refuse()
            return
        for call in calls:
            self._give(*call)
        self.rest = self._text[self._json_end :]

    def _end_text(self, stop: int, end: int) -> None:
        body, form = self._text[:stop], self.functions.form
        try:
            match form.style:
                case CallStyle.TAGS:
                    calls = [tagged_call(body, form, self.functions.types)]
                case CallStyle.MARKED:
                    calls = [marked_call(body, form)]
                case _:
                    calls = python_calls(body)
            if not all(name in self.functions for name, _ in calls):
                raise NoCallError
        except ValueError:
            self._refuse()
            return
        for call in calls:
            self._give(*call)
        self.rest = self._text[end:]

    def _call(self, value: object) -> tuple[str, str]:
        """Returns name and arguments of a call as JSON. Raises NoCallError."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(name, str) or name not in self.functions:
            raise NoCallError
        arguments = value.get(self.functions.form.arguments_key, {})
        if isinstance(arguments, str):
            # Some models write the arguments as a text that is JSON.
            arguments = _json(arguments)
        if not isinstance(arguments, dict):
            raise NoCallError
        return name, json_of(arguments)

    def _give(self, name: str, arguments: str) -> None:
        self.deltas.append(CallDelta(self.index, arguments, _new_id(), name))
        self.index += 1

    def _refuse(self) -> None:
        self.is_refused, self.rest = True, self._text


def _json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Never:
    raise NoCallError(name)


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
