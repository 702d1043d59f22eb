"""The services that a command talks to: those it was given, those of the environment, or the running `lookonce up`."""

from __future__ import annotations

from collections.abc import Sequence

from lookonce.client import Client
from lookonce.errors import ConfigurationError
from lookonce.local.cli_settings import CliSettings
from lookonce.local.stack_record import StackRecord, only_stack, running_stacks


def decoder_target(given: str | None) -> str:
    """Returns host:port of the decoder. Raises ConfigurationError if none is given and not exactly one stack runs."""
    chosen = given or CliSettings().target
    if chosen is not None:
        return chosen
    record = only_stack(stacks())
    if record is None:
        raise ConfigurationError("no running server found; start one with `lookonce up`, or give --target host:port")
    return record.decoders[0]


def admin_target(given: str | None) -> str:
    """Returns host:port of an encoder's operators' calls. Raises ConfigurationError as `decoder_target`."""
    chosen = given or CliSettings().admin_target
    if chosen is not None:
        return chosen
    record = only_stack(stacks())
    if record is None:
        raise ConfigurationError(
            "no operators' calls found; start a server with `lookonce up`, or give --target host:port of an encoder's "
            "admin_listen"
        )
    return record.admin


def decoder_admin_targets(given: str | None) -> Sequence[str]:
    """Returns host:port of decoders' operators' calls. Raises ConfigurationError as `decoder_target`."""
    if given is not None:
        return [given]
    record = only_stack(stacks())
    if record is None or not record.decoder_admins:
        raise ConfigurationError(
            "no operators' calls of a decoder found; start a server with `lookonce up`, or give --target host:port "
            "of a decoder's admin_listen"
        )
    return record.decoder_admins


def stacks() -> list[StackRecord]:
    """Returns this user's running stacks. Raises ConfigurationError if others could have written a record."""
    return running_stacks(CliSettings().record_dir)


def client_of(target: str | None) -> Client:
    """Returns a client of the decoder, and of its encoder as well if the decoder is one of a running stack."""
    decoder = decoder_target(target)
    encoders = (record.encoders[0] for record in stacks() if decoder in record.decoders)
    return connect(decoder, next(encoders, None))


def connect(decoder: str, encoder: str | None = None) -> Client:
    """Returns a client with the token and the TLS files of the environment."""
    return Client.connect(decoder, encoder, **CliSettings().connection())
