"""Finds the end of a JSON object or list in a text that comes piece by piece."""

from __future__ import annotations

import re

_IN_TEXT = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class JsonScanner:
    """Counts the brackets of one object or list. What is inside need not be correct JSON."""

    def __init__(self, depth: int = 0) -> None:
        """`depth` is the number of brackets that are open before the first piece."""
        self._depth = depth
        self._is_in_text = False
        # Whether the next character belongs to a backslash.
        self._is_escaped = False

    def end_in(self, piece: str) -> int | None:
        """Reads the next piece, and returns the index behind the value's last bracket in it; None: it goes on."""
        start = 0
        if self._is_escaped and piece:
            start, self._is_escaped = 1, False
        while True:
            found = (_IN_TEXT if self._is_in_text else _OUTSIDE).search(piece, start)
            if found is None:
                return None
            start = found.end()
            if found[0] == '"':
                self._is_in_text = not self._is_in_text
            elif found[0] == "\\":
                # The character behind it is no quotation mark of JSON.
                self._is_escaped = start == len(piece)
                start += 1
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    return start
