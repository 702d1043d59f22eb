"""Rewrites the regular expressions of JSON schemas, so that llguidance takes them as JSON Schema means them.

llguidance (1.9) reads patterns as Rust does and writes the texts that they match as JSON. Two things go wrong then.
Inside of brackets, `[`, `&&` and `~~` have a meaning in Rust and none in JSON Schema. And where a set of characters has
the character 0, it also takes `"` and `\\` in the answer: `[^"]` would match a quote. No text of an answer needs the
character 0, so sets that exclude others exclude it as well.

A control character that JSON writes as a number would be left out of the answer, so a pattern must not ask for one.
White space is that of ECMAScript, which has U+FEFF and not U+0085.
"""

from __future__ import annotations

import re

# Groups, repetitions and places that Rust knows and JSON Schema does not, or that mean something else there.
_NOT_SHARED = re.compile(r"\(\?(?![:=!<])|[*+?}][+*{]|\\[AzZU]|\\x\{")
# A dot takes no end of a line.
_ANY = r"[^\x00\n\r\x{2028}\x{2029}]"
_NUL = "\\x00"
# White space without the vertical tab, which no answer has.
_SPACES = r"\t\n\f\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
# One control character that answers never have, however it is written.
_CONTROL = re.compile(
    r"[\x01-\x07\x0b\x0e-\x1f\x7f]"
    r"|\\(?:[va]|c[A-Za-z]|(?:x|u00)(?:0[1-7bBeEfF]|1[0-9a-fA-F]|7[fF])|[xu]\{0*(?:[1-7bBeEfF]|1[0-9a-fA-F]|7[fF])\})"
)
_NULS = ("\\x00", "\\u0000", "\\0", "\x00", "\\x{0}", "\\u{0}")


def exact_pattern(pattern: str) -> str:
    """Returns a pattern with the same meaning for llguidance as JSON Schema gives it, without the character 0.

    Raises ValueError for what the two do not share.
    """
    for nul in _NULS:
        if nul in pattern:
            raise ValueError(f"the pattern {pattern!r} has the character 0, which is not supported")
    if re.search(r"(?<!\\)(?:\\\\)*\\\Z", pattern):
        raise ValueError(f"the pattern {pattern!r} ends with a backslash")
    parts: list[str] = []
    index = 0
    while index < len(pattern):
        part, index = _set(pattern, index) if pattern[index] == "[" else _outside_of_sets(pattern, index)
        parts.append(part)
    return "".join(parts)


def _outside_of_sets(pattern: str, index: int) -> tuple[str, int]:
    """Returns the character or escape at a place, rewritten, and where it ends."""
    if control := _CONTROL.match(pattern, index):
        raise _control_error(pattern, control[0])
    if syntax := _NOT_SHARED.match(pattern, index):
        raise ValueError(f"the pattern {pattern!r} has {syntax[0]}, which is not supported")
    if pattern[index] == "\\":
        escape = pattern[index : index + 2]
        return (f"[{_SPACES}]" if escape == "\\s" else _escape(escape)), index + 2
    return (_ANY if pattern[index] == "." else pattern[index]), index + 1


def _set(pattern: str, start: int) -> tuple[str, int]:
    """Returns the characters in brackets that begin at a place, rewritten, and where they end."""
    index = start + 1
    parts = ["["]
    if pattern.startswith("^", index):
        parts.append(f"^{_NUL}")
        index += 1
    if pattern.startswith("]", index):
        raise ValueError(f"the pattern {pattern!r} has empty brackets, which are not supported")
    while index < len(pattern) and pattern[index] != "]":
        control = _CONTROL.match(pattern, index)
        if control is not None:
            # A set that has other characters, too, is right without this one.
            if index == start + 1 and pattern.startswith("]", control.end()):
                raise _control_error(pattern, control[0])
            parts.append(control[0])
            index = control.end()
        elif pattern[index] == "\\":
            escape = pattern[index : index + 2]
            parts.append(_SPACES if escape == "\\s" else _escape(escape))
            index += 2
        elif pattern.startswith("--", index):
            raise ValueError(f"the pattern {pattern!r} has -- inside of brackets, which is not supported; write \\-")
        else:
            parts.append(f"\\{pattern[index]}" if pattern[index] in "[&~" else pattern[index])
            index += 1
    return "".join([*parts, pattern[index : index + 1]]), index + 1


def _control_error(pattern: str, control: str) -> ValueError:
    return ValueError(f"the pattern {pattern!r} has the control character {control!r}, which is not supported")


def _escape(escape: str) -> str:
    return f"[^{_NUL}{_SPACES}]" if escape == "\\S" else escape
