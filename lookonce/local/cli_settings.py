"""Environment settings of the `lookonce` command."""

from __future__ import annotations

import os
import pathlib
import tempfile
from typing import TypedDict

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from lookonce.errors import ConfigurationError


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

    target: str | None = Field(default=None, description="host:port of the decoder that commands ask.")
    admin_target: str | None = Field(
        default=None, description="host:port of the operators' calls of an encoder (its admin_listen), for cache."
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
        """Folder of the records of running stacks; only this user may write it."""
        if self.runtime_dir is not None:
            return self.runtime_dir / "lookonce"
        return pathlib.Path(tempfile.gettempdir()) / f"lookonce-{os.getuid()}"
