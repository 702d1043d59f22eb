"""Rewrites the regular expressions of JSON schemas, so that llguidance takes them as JSON Schema means them.

llguidance (1.9) reads patterns as Rust does and writes the texts that they match as JSON. Two things go wrong then.
Inside of brackets, `[`, `&&` and `~~` have a meaning in Rust and none in JSON Schema. And where a set of characters has
the character 0, it also takes `"` and `\\` in the answer: `[^"]` would match a quote. No text of an answer needs the
character 0, so sets that exclude others exclude it as well.
"""

from __future__ import annotations

import re

# Groups and repetitions that Rust knows and JSON Schema does not, or that mean something else there.
_NOT_SHARED = re.compile(r"(?<!\\)\(\?(?![:=!<])|(?<!\\)[*+?}]\+")
# A dot takes no end of a line.
_ANY = r"[^\x00\n\r\x{2028}\x{2029}]"
_NUL = "\\x00"
_NULS = ("\\x00", "\\u0000", "\\0", "\x00", "\\x{0}", "\\u{0}")


def exact_pattern(pattern: str) -> str:
    """Returns a pattern with the same meaning for llguidance as JSON Schema gives it, without the character 0."""
    if syntax := _NOT_SHARED.search(pattern):
        raise ValueError(f"the pattern {pattern!r} has {syntax[0]}, which is not supported")
    for nul in _NULS:
        if nul in pattern:
            raise ValueError(f"the pattern {pattern!r} has the character 0, which is not supported")
    parts: list[str] = []
    index, is_in_set = 0, False
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            parts.append(pattern[index : index + 2])
            index += 2
            continue
        index += 1
        if not is_in_set and char == "[":
            is_in_set = True
            parts.append(char)
            if pattern.startswith("^", index):
                parts.append(f"^{_NUL}")
                index += 1
        elif is_in_set and char == "]":
            is_in_set = False
            parts.append(char)
        elif is_in_set and char in "[&~":
            parts.append(f"\\{char}")
        elif not is_in_set and char == ".":
            parts.append(_ANY)
        elif is_in_set and pattern.startswith("--", index - 1):
            raise ValueError(f"the pattern {pattern!r} has -- inside of brackets, which is not supported; write \\-")
        else:
            parts.append(char)
    return "".join(parts)
