"""Values of files that operators may change while a service runs; a changed file is read again."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

from lookonce.errors import ConfigurationError
from lookonce.logs import get_logger

ValueT = TypeVar("ValueT")
ValueT_co = TypeVar("ValueT_co", covariant=True)
# Inode, time of change in nanoseconds, size; None: the file does not exist.
_Version: TypeAlias = "tuple[int, int, int] | None"

# Pause between checks. Kubernetes takes about a minute to deliver a changed Secret.
_LOOK_S = 1.0

_log = get_logger(__name__)


class Current(Protocol[ValueT_co]):
    """A value that may change between reads."""

    @property
    def value(self) -> ValueT_co:
        """The current value; it may change between reads."""
        ...


class WatchedFiles(Generic[ValueT]):
    """The parsed value of files that belong together. Thread-safe."""

    def __init__(self, name: str, paths: tuple[pathlib.Path, ...], parse: Callable[..., ValueT]) -> None:
        """`parse` takes the content of each file and returns the value; it raises ValueError for invalid content.

        `name` is the name of the setting. Raises ConfigurationError for files that cannot be read or are invalid.
        """
        self._name, self._paths, self._parse = name, paths, parse
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        # Taken before the content is read, so that a change in between is noticed later.
        self._versions = self._current_versions()
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{name}: {', '.join(map(str, paths))} {_reason(error)}") from None

    @property
    def value(self) -> ValueT:
        """The value of the files, or the last valid one. Checks the files at most once a second."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s >= _LOOK_S:
                self._looked_s = now_s
                self._read_if_changed()
            return self._value

    def _read_if_changed(self) -> None:
        versions = self._current_versions()
        if versions == self._versions:
            return
        self._versions = versions
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            _log.error("a changed file is not used", setting=self._name, reason=_reason(error))
        else:
            _log.info("a changed file is in use", setting=self._name)

    def _read(self) -> ValueT:
        return self._parse(*(path.read_bytes() for path in self._paths))

    def _current_versions(self) -> tuple[_Version, ...]:
        return tuple(map(_version, self._paths))


def _version(path: pathlib.Path) -> _Version:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return str(error)
