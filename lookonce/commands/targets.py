"""The services that a command talks to: those it was given, those of the environment, or the running `lookonce up`."""

from __future__ import annotations

from lookonce.client import Client
from lookonce.errors import ConfigurationError
from lookonce.local.cli_settings import CliSettings, StackRecord, find_stack


def decoder_target(given: str | None) -> str:
    """Returns host:port of the decoder. Raises ConfigurationError if none is given and none runs."""
    chosen = given or CliSettings().target
    if chosen is not None:
        return chosen
    record = running_stack()
    if record is None:
        raise ConfigurationError("no running server found; start one with `lookonce up`, or give --target host:port")
    return record.decoder_target


def admin_target(given: str | None) -> str:
    """Returns host:port of an encoder's operators' calls. Raises ConfigurationError if none is given and none runs."""
    chosen = given or CliSettings().admin_target
    if chosen is None and (record := running_stack()) is not None:
        chosen = record.admin_target
    if chosen is None:
        raise ConfigurationError(
            "no operators' calls found; start a server with `lookonce up`, or give --target host:port of an encoder's "
            "admin_listen"
        )
    return chosen


def running_stack() -> StackRecord | None:
    """Returns this user's running `lookonce up`. Raises ConfigurationError if others could have written its record."""
    return find_stack(CliSettings().record_dir)


def client_of(target: str | None) -> Client:
    """Returns a client of the decoder, and of its encoder as well if the decoder is the running stack's."""
    decoder, record = decoder_target(target), running_stack()
    is_running_stack = record is not None and record.decoder_target == decoder
    return connect(decoder, record.encoder_target if record is not None and is_running_stack else None)


def connect(decoder: str, encoder: str | None = None) -> Client:
    """Returns a client with the token and the TLS files of the environment."""
    return Client.connect(decoder, encoder, **CliSettings().connection())
