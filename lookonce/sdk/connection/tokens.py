"""The bearer token of each call: a fixed one, the content of a file that others replace, or a function's result."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import TypeAlias

from lookonce.errors import ConfigurationError

Token: TypeAlias = "str | os.PathLike[str] | Callable[[], str]"
"""A token, the file that holds it, or a function that returns it and does not block."""

# A file is read again when the last look is so old, seconds. Kubernetes replaces tokens long before they expire.
_LOOK_S = 5.0


class TokenSource:
    """Returns the token of each call. Thread-safe."""

    def __init__(self, token: Token) -> None:
        """Raises ConfigurationError for a token that no call could send, and for a file that cannot be read."""
        self._function: Callable[[], str] | None = None
        self._path: pathlib.Path | None = None
        self._looked_s = 0.0
        given: object = token
        if isinstance(given, os.PathLike):
            self._path = pathlib.Path(given)
            self._token = _checked(self._read())
        elif callable(given):
            self._function = given
            self._token = ""
        else:
            self._token = _checked(given)

    def current(self) -> str:
        """Returns the token for a call that begins now.

        Raises ConfigurationError for an unusable token. If a file cannot be read any more, its last token stays.
        """
        if self._function is not None:
            return _checked(self._function())
        if self._path is not None and time.monotonic() - self._looked_s >= _LOOK_S:
            try:
                self._token = _checked(self._read())
            except ConfigurationError:
                self._looked_s = time.monotonic()
        return self._token

    def _read(self) -> str:
        assert self._path is not None
        try:
            text = self._path.read_text("utf-8")
        except (OSError, ValueError):
            raise ConfigurationError(f"the token's file {self._path} cannot be read") from None
        self._looked_s = time.monotonic()
        return text.strip()


def _checked(token: object) -> str:
    # gRPC would refuse it at every call, with an error that shows the token.
    is_usable = isinstance(token, str) and token.isascii() and token.isprintable() and bool(token) and " " not in token
    if not is_usable:
        raise ConfigurationError("the token must be text of printable ASCII without spaces and line ends")
    assert isinstance(token, str)
    return token
