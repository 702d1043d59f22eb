"""The records of this user's running `lookonce up`: files that lead other commands to its services."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from lookonce.errors import ConfigurationError

_PREFIX, _SUFFIX = "up-", ".json"


@dataclass(frozen=True, slots=True)
class StackRecord:
    """The record of one running `lookonce up`. Addresses are host:port and stay the same while it runs."""

    # Process id of `lookonce up`.
    pid: int
    decoders: tuple[str, ...]
    encoders: tuple[str, ...]
    # The operators' calls of the first encoder.
    admin: str
    # Prometheus endpoints, in the order of the services.
    decoder_metrics: tuple[str, ...]
    encoder_metrics: tuple[str, ...]
    # The operators' calls of the decoders, in their order.
    decoder_admins: tuple[str, ...] = ()

    def write(self, directory: pathlib.Path) -> None:
        """Writes the record, and removes those of processes that have ended without removing theirs.

        Raises ConfigurationError if others may write the folder.
        """
        _make_private(directory)
        for path in _paths(directory):
            if not _is_alive(_pid_of(path)):
                path.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
            json.dump(asdict(self), file)
        os.replace(file.name, self._path(directory))

    def remove(self, directory: pathlib.Path) -> None:
        """Removes the record, if it is there."""
        self._path(directory).unlink(missing_ok=True)

    def _path(self, directory: pathlib.Path) -> pathlib.Path:
        return directory / f"{_PREFIX}{self.pid}{_SUFFIX}"


def running_stacks(directory: pathlib.Path) -> list[StackRecord]:
    """Returns the running stacks, the oldest process id first.

    Raises ConfigurationError for records that others could have written, and for a damaged one.
    """
    if not directory.exists():
        return []
    _check_private(directory)
    return [_read(path) for path in _paths(directory) if _is_alive(_pid_of(path))]


def only_stack(records: Sequence[StackRecord]) -> StackRecord | None:
    """Returns the running stack, None if there is none. Raises ConfigurationError that lists them if there are several.

    A command must not choose one by chance.
    """
    if len(records) > 1:
        listed = ", ".join(f"decoder at {record.decoders[0]} (process {record.pid})" for record in records)
        raise ConfigurationError(f"{len(records)} `lookonce up` are running: {listed}; choose with --target host:port")
    return records[0] if records else None


def _paths(directory: pathlib.Path) -> list[pathlib.Path]:
    named = directory.glob(f"{_PREFIX}*{_SUFFIX}")
    return sorted((path for path in named if path.name[len(_PREFIX) : -len(_SUFFIX)].isdecimal()), key=_pid_of)


def _pid_of(path: pathlib.Path) -> int:
    return int(path.name[len(_PREFIX) : -len(_SUFFIX)])


def _read(path: pathlib.Path) -> StackRecord:
    try:
        content = json.loads(path.read_text())
        values = {field.name: content[field.name] for field in fields(StackRecord)}
        lists = {name: tuple(map(str, value)) for name, value in values.items() if isinstance(value, list)}
        record = StackRecord(**(values | lists))
        if not (record.decoders and record.encoders):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"{path} is damaged; remove it") from None
    return record


def _make_private(directory: pathlib.Path) -> None:
    """Makes the folder if there is none. Raises ConfigurationError if others may write it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)


def _check_private(directory: pathlib.Path) -> None:
    """Raises ConfigurationError if others may write the folder: their record could direct pictures to their server."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigurationError(f"{directory} must be a folder that only this user can write; remove it")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        # Another user's process did not write the record: its id has been used again.
        return False
    return True
