"""What the command line takes from its environment, and the record by which commands find the running `lookonce up`."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import tempfile
from dataclasses import asdict, dataclass

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from lookonce.errors import ConfigurationError

_RECORD_NAME = "up.json"


class CliSettings(BaseSettings):
    """Environment of the `lookonce` command."""

    model_config = SettingsConfigDict(env_prefix="LOOKONCE_", frozen=True, extra="ignore", hide_input_in_errors=True)

    target: str | None = Field(default=None, description="Decoder that generate, encode and lookup ask.")
    redis_url: SecretStr | None = Field(default=None, description="Cache that `up` uses instead of starting one.")
    token: SecretStr | None = Field(default=None, description="Bearer token of the calls.")
    tls_ca: pathlib.Path | None = Field(default=None, description="PEM certificates of the servers' authorities.")
    tls_cert: pathlib.Path | None = Field(default=None, description="PEM certificate chain of this client.")
    tls_key: pathlib.Path | None = Field(default=None, description="PEM private key of it.")
    runtime_dir: pathlib.Path | None = Field(
        default=None,
        validation_alias="XDG_RUNTIME_DIR",
        description="Folder of this user for files of running programs.",
    )

    @property
    def record_dir(self) -> pathlib.Path:
        """Where the record of the running stack lies; a folder of this user alone."""
        if self.runtime_dir is not None:
            return self.runtime_dir / "lookonce"
        return pathlib.Path(tempfile.gettempdir()) / f"lookonce-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class StackRecord:
    """The running `lookonce up` of this user."""

    # host:port of its first decoder and encoder.
    decoder_target: str
    encoder_target: str
    # Of the process that holds the stack.
    pid: int

    def write(self, directory: pathlib.Path) -> None:
        """Replaces the record; the newest `up` is the one that commands find."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
            json.dump(asdict(self), file)
        os.replace(file.name, directory / _RECORD_NAME)

    def remove(self, directory: pathlib.Path) -> None:
        """Removes the record unless a later `up` has replaced it."""
        if find_stack(directory) == self:
            (directory / _RECORD_NAME).unlink(missing_ok=True)


def find_stack(directory: pathlib.Path) -> StackRecord | None:
    """The running stack, None when there is none. Raises ConfigurationError when others could have written it."""
    path = directory / _RECORD_NAME
    if not path.exists():
        return None
    _check_private(directory)
    content = json.loads(path.read_text())
    record = StackRecord(content["decoder_target"], content["encoder_target"], content["pid"])
    return record if _is_alive(record.pid) else None


def _check_private(directory: pathlib.Path) -> None:
    """Another user's record could send this user's pictures to that user's server."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigurationError(f"{directory} must be a folder that only this user can write")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        # Somebody else's is not the one that wrote the record: the number has been given away again.
        return False
    return True
