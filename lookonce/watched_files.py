"""Files that operators change while a service runs: their meaning, read again when one of them is another one."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

import structlog

from lookonce.errors import ConfigurationError

ValueT = TypeVar("ValueT")
ValueT_co = TypeVar("ValueT_co", covariant=True)
# Node, time of change in nanoseconds, size; None: there is no file.
_Version: TypeAlias = "tuple[int, int, int] | None"

# Between looks at the files. Kubernetes takes about a minute to bring a changed Secret.
_LOOK_S = 1.0

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Current(Protocol[ValueT_co]):
    """A value that may be another one the next time."""

    @property
    def value(self) -> ValueT_co:
        """Of this moment."""
        ...


class WatchedFiles(Generic[ValueT]):
    """For use by any thread. Files that belong together are read together."""

    def __init__(self, name: str, paths: tuple[pathlib.Path, ...], parse: Callable[..., ValueT]) -> None:
        """`parse` takes the content of each file and raises ValueError, with what is wrong, where it means nothing.

        `name` is the setting's. Raises ConfigurationError for files that cannot be read or mean nothing at the start.
        """
        self._name, self._paths, self._parse = name, paths, parse
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        # Taken before the content: what changes in between is read again.
        self._versions = self._current_versions()
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{name}: {', '.join(map(str, paths))} {_reason(error)}") from None

    @property
    def value(self) -> ValueT:
        """What the files say, or said last when they mean nothing now. Looks at them once a second at most."""
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
