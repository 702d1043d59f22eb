"""Environment settings of the `lookonce` command, and the record that leads commands to a running `lookonce up`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TypedDict

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from lookonce.errors import ConfigurationError

_RECORD_NAME = "up.json"
# Held by a running `lookonce up`. The kernel frees it when the process ends, however it ends.
_LOCK_NAME = "up.lock"


class ConnectionArguments(TypedDict):
    """Arguments of the clients' `connect`: the token, and PEM files as described there."""

    tls_ca: pathlib.Path | None
    tls_cert: pathlib.Path | None
    tls_key: pathlib.Path | None
    token: str | None
    token_over_plaintext: bool


class CliSettings(BaseSettings):
    """Environment settings of the `lookonce` command."""

    model_config = SettingsConfigDict(env_prefix="LOOKONCE_", frozen=True, extra="ignore", hide_input_in_errors=True)

    target: str | None = Field(default=None, description="host:port of the decoder for generate, encode and lookup.")
    admin_target: str | None = Field(
        default=None, description="host:port of the operators' calls of an encoder (its admin_listen), for evict."
    )
    redis_url: SecretStr | None = Field(default=None, description="Redis that `up` uses instead of its own.")
    token: SecretStr | None = Field(default=None, description="Bearer token for calls.")
    token_over_plaintext: bool = Field(
        default=False, description="Whether the token may go to another machine without TLS."
    )
    tls_ca: pathlib.Path | None = Field(
        default=None,
        description="PEM file with the servers' certificate authorities, or `system` for the system's.",
    )
    tls_cert: pathlib.Path | None = Field(default=None, description="PEM file with the client's certificate chain.")
    tls_key: pathlib.Path | None = Field(default=None, description="PEM file with the client's private key.")
    runtime_dir: pathlib.Path | None = Field(
        default=None,
        validation_alias="XDG_RUNTIME_DIR",
        description="Folder for the user's files of running programs.",
    )

    @field_validator("target", "admin_target", "redis_url", "token", "runtime_dir", mode="before")
    @classmethod
    def _unset_if_empty(cls, value: object) -> object:
        """Takes an empty variable for an unset one, as most programs do.

        White space around a value does not count: a Secret made from a file has the line end of the file.
        """
        return (value.strip() or None) if isinstance(value, str) else value

    @field_validator("tls_ca", "tls_cert", "tls_key", mode="before")
    @classmethod
    def _refuse_empty(cls, value: object, field: ValidationInfo) -> object:
        """Raises ConfigurationError for an empty variable: to take it for an unset one would mean plaintext."""
        if value == "":
            raise ConfigurationError(f"LOOKONCE_{str(field.field_name).upper()} is empty; name a PEM file, or unset it")
        return value

    def connection(self) -> ConnectionArguments:
        """Returns the TLS files and the token for calls."""
        token = None if self.token is None else self.token.get_secret_value()
        return {
            "tls_ca": self.tls_ca,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "token": token,
            "token_over_plaintext": self.token_over_plaintext,
        }

    @property
    def record_dir(self) -> pathlib.Path:
        """Folder of the running stack's record; only this user may write it."""
        if self.runtime_dir is not None:
            return self.runtime_dir / "lookonce"
        return pathlib.Path(tempfile.gettempdir()) / f"lookonce-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class StackRecord:
    """The record of this user's running `lookonce up`."""

    # host:port of the first decoder and the first encoder.
    decoder_target: str
    encoder_target: str
    # Process id of `lookonce up`.
    pid: int
    # host:port of the first encoder's operators' calls.
    admin_target: str | None = None

    def write(self, directory: pathlib.Path) -> None:
        """Writes the record and replaces an older one, so commands find the newest `up`."""
        _make_private(directory)
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
            json.dump(asdict(self), file)
        os.replace(file.name, directory / _RECORD_NAME)

    def remove(self, directory: pathlib.Path) -> None:
        """Removes the record, unless a later `up` has replaced it."""
        if find_stack(directory) == self:
            (directory / _RECORD_NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def only_stack(directory: pathlib.Path) -> Iterator[None]:
    """Makes this process the only `lookonce up` of its user for the duration of the block.

    Commands find one stack only, so a second one would hide the first. Raises ConfigurationError that names the running
    one.
    """
    _make_private(directory)
    with (directory / _LOCK_NAME).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(_running(find_stack(directory))) from None
        yield


def _running(record: StackRecord | None) -> str:
    if record is None:
        return "another `lookonce up` is starting or stopping; wait for it, or stop it first"
    return (
        f"`lookonce up` is running already: decoder at {record.decoder_target}, process {record.pid}; "
        f"use it, or stop it first with Ctrl-C or `kill {record.pid}`"
    )


def find_stack(directory: pathlib.Path) -> StackRecord | None:
    """Returns the running stack, or None. Raises ConfigurationError for a record of others or a damaged one."""
    path = directory / _RECORD_NAME
    if not path.exists():
        return None
    _check_private(directory)
    try:
        content = json.loads(path.read_text())
        record = StackRecord(
            content["decoder_target"], content["encoder_target"], int(content["pid"]), content.get("admin_target")
        )
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"{path} is damaged; remove it") from None
    return record if _is_alive(record.pid) else None


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
    except (ProcessLookupError, PermissionError):
        # Another user's process did not write the record: its id has been used again.
        return False
    return True
