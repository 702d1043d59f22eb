"""Reads calls whose arguments are not JSON, and gives the arguments as JSON. Nothing in them is run."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Never

from decoder_svc.tools.tool_formats import ToolFormat

# Arguments nested more deeply than this are no call.
_MAX_DEPTH = 64
_BARE_VALUE = re.compile(r"[^,{}\[\]]*")
_BARE_KEY = re.compile(r"\s*([^:{}\[\],]*?)\s*:")


class NoCallError(ValueError):
    """A text that has not the form of a call."""


def json_of(value: Any) -> str:
    """Returns a value as JSON. Raises NoCallError for numbers that JSON has not."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        # Halves of surrogate pairs can only be written as escapes.
        return json.dumps(value)
    except ValueError as error:
        raise NoCallError from error
    return text


def _object_of(pairs: Mapping[str, str]) -> str:
    """Returns a JSON object from names and values that are JSON already."""
    return "{" + ", ".join(f"{json_of(name)}: {value}" for name, value in pairs.items()) + "}"


def tagged_call(text: str, form: ToolFormat, types: Mapping[str, Mapping[str, frozenset[str]]]) -> tuple[str, str]:
    """Returns name and arguments of a call whose arguments have tags of their own. Raises NoCallError.

    `types` are the JSON types of each function's arguments. A value is text where only a text is allowed, or where it
    is no JSON of another type.
    """
    name_begin, key_begin = form.name_begin.strip(), form.key_begin
    _, found, rest = text.partition(name_begin) if name_begin else ("", "yes", text)
    ends = [rest.find(mark) for mark in (form.name_end.strip() or "\n", key_begin) if mark in rest]
    name = rest[: min(ends, default=len(rest))].strip()
    if not found or not name:
        raise NoCallError
    key_end, value_begin = _halves(form.key_end)
    arguments: dict[str, str] = {}
    for part in rest.split(key_begin)[1:]:
        key, has_key_end, value = part.partition(key_end)
        if value_begin:
            _, has_key_end, value = value.partition(value_begin)
        value, has_value_end, _ = value.rpartition(form.value_end.strip())
        if not has_key_end or not has_value_end:
            raise NoCallError
        # Qwen writes each value in lines of its own.
        if not value_begin:
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _typed(value, types.get(name, {}).get(key.strip(), frozenset()))
    return name, _object_of(arguments)


def _halves(key_end: str) -> tuple[str, str]:
    """Returns the text that ends a key, and the one that begins its value; the latter is empty if it is the same."""
    ended, newline, begun = key_end.partition("\n")
    return ended, begun if newline else ""


def _typed(value: str, types: frozenset[str]) -> str:
    """Returns a value as JSON."""
    if types == {"string"}:
        return json_of(value)
    try:
        read = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json_of(value)
    # An argument that may be a text as well as something else: a text looks like itself only.
    return json_of(value) if isinstance(read, str) and "string" in types else value.strip()


def _no_constant(name: str) -> Never:
    raise NoCallError(name)


def python_calls(text: str) -> list[tuple[str, str]]:
    """Returns name and arguments of each call in a Python list. Raises NoCallError."""
    text = text.strip()
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoCallError from None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise NoCallError
    try:
        return [_python_call(node, text) for node in tree.elts]
    except (ValueError, RecursionError):
        raise NoCallError from None


def _python_call(node: ast.expr, text: str) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise NoCallError
    arguments = {str(keyword.arg): _literal(keyword.value, text) for keyword in node.keywords}
    if any(keyword.arg is None for keyword in node.keywords):
        raise NoCallError
    return ast.unparse(node.func), _object_of(arguments)


def _literal(node: ast.expr, text: str) -> str:
    """Returns the value of a literal of Python or JSON, as JSON. `text` is the whole list of calls."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return node.id
    if isinstance(node, ast.List | ast.Tuple):
        return f"[{', '.join(_literal(each, text) for each in node.elts)}]"
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise NoCallError
        return _object_of(dict(zip(map(str, keys), (_literal(each, text) for each in node.values), strict=True)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand, text)
        if value[:1].isdigit():
            return f"-{value}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        is_endless = isinstance(node.value, float) and math.isinf(node.value)
        # A float cannot hold it, but JSON can.
        return str(ast.get_source_segment(text, node)) if is_endless else json_of(node.value)
    raise NoCallError


_JSON_NAMES = frozenset({"true", "false", "null"})


def marked_call(text: str, form: ToolFormat) -> tuple[str, str]:
    """Returns name and arguments of a call whose texts stand between marks. Raises NoCallError."""
    head, brace, _ = text.partition("{")
    name = head.strip().removeprefix(form.name_begin).strip()
    if not brace or not name:
        raise NoCallError
    value, rest = _MarkedReader(form.mark).read(text[len(head) :], 0)
    if rest.strip() or not isinstance(value, dict):
        raise NoCallError
    return name, json_of(value)


class _MarkedReader:
    """Reads values in which texts stand between marks, and keys have none."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def read(self, text: str, depth: int) -> tuple[Any, str]:
        """Returns the value at the beginning of a text, and what follows. Raises NoCallError."""
        text = text.lstrip()
        if depth > _MAX_DEPTH:
            raise NoCallError
        if text.startswith(self._mark):
            value, found, rest = text[len(self._mark) :].partition(self._mark)
            if not found:
                raise NoCallError
            return value, rest
        if text[:1] == "{":
            return self._pairs(text[1:], depth)
        if text[:1] == "[":
            return self._elements(text[1:], depth)
        bare = _BARE_VALUE.match(text)
        word = bare[0].strip() if bare is not None else ""
        if not word:
            raise NoCallError
        try:
            value = json.loads(word)
        except (ValueError, RecursionError):
            value = word
        return value, text[len(word) :]

    def _pairs(self, text: str, depth: int) -> tuple[dict[str, Any], str]:
        found: dict[str, Any] = {}
        while not text.lstrip().startswith("}"):
            key = _BARE_KEY.match(text)
            if key is None:
                raise NoCallError
            found[key[1].replace(self._mark, "").strip('"')], text = self.read(text[key.end() :], depth + 1)
            text = self._behind_comma(text, "}")
        return found, text.lstrip()[1:]

    def _elements(self, text: str, depth: int) -> tuple[list[Any], str]:
        found: list[Any] = []
        while not text.lstrip().startswith("]"):
            value, text = self.read(text, depth + 1)
            found.append(value)
            text = self._behind_comma(text, "]")
        return found, text.lstrip()[1:]

    def _behind_comma(self, text: str, end: str) -> str:
        text = text.lstrip()
        if text[:1] == ",":
            return text[1:]
        if text[:1] != end:
            raise NoCallError
        return text
