"""Reads a client's target, token and TLS files from the environment, for programs that name none themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from lookonce.errors import ConfigurationError
from lookonce.sdk.connection.target import Target
from lookonce.sdk.connection.tokens import Token

File: TypeAlias = "str | os.PathLike[str] | None"


@dataclass(frozen=True, slots=True)
class NamedConnection:
    """The target of a client, its PEM files and its token, in the order of `connect`. None where there is none.

    `token_over_plaintext` says whether the token may go to another machine without TLS.
    """

    target: Target
    tls_ca: File
    tls_cert: File
    tls_key: File
    token: Token | None
    token_over_plaintext: bool


def named_connection(
    target: Target | None,
    tls_ca: File,
    tls_cert: File,
    tls_key: File,
    token: Token | None,
    token_over_plaintext: bool,
) -> NamedConnection:
    """Returns the arguments of `connect`. Without a target, the environment stands in for it and all that is None.

    Its variables are LOOKONCE_TARGET, LOOKONCE_TOKEN, LOOKONCE_TOKEN_OVER_PLAINTEXT, LOOKONCE_TLS_CA, LOOKONCE_TLS_CERT
    and LOOKONCE_TLS_KEY. Where the caller names a target, they are not read: the token of one server is not for another
    one. Raises ConfigurationError if there is no target, and for an empty name of a file, which would mean plaintext.
    """
    if target is not None:
        return NamedConnection(target, tls_ca, tls_cert, tls_key, token, token_over_plaintext)
    text = _text("LOOKONCE_TARGET")
    if text is None:
        raise ConfigurationError("no server is named; give a target such as 127.0.0.1:50051, or set LOOKONCE_TARGET")
    ca, certificate, key = (
        _file(name) if given is None else given
        for name, given in (
            ("LOOKONCE_TLS_CA", tls_ca),
            ("LOOKONCE_TLS_CERT", tls_cert),
            ("LOOKONCE_TLS_KEY", tls_key),
        )
    )
    named_token = _text("LOOKONCE_TOKEN") if token is None else token
    return NamedConnection(
        text,
        ca,
        certificate,
        key,
        named_token,
        _is_true("LOOKONCE_TOKEN_OVER_PLAINTEXT") if token_over_plaintext is False else token_over_plaintext,
    )


def _text(name: str) -> str | None:
    """Returns a variable's value; None for an unset one, and for an empty one, as most programs do.

    White space around a value does not count: a Secret made from a file has the line end of the file.
    """
    return os.environ.get(name, "").strip() or None


def _is_true(name: str) -> bool:
    value = (_text(name) or "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise ConfigurationError(f"{name} must be true or false")
    return value in ("true", "1")


def _file(name: str) -> str | None:
    value = os.environ.get(name)
    if value is not None and not value.strip():
        raise ConfigurationError(f"{name} is empty; name a PEM file, or unset it")
    return value
