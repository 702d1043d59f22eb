"""`lookonce adapters`: the operators' calls of decoders about their LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lookonce.admin.client import AdminClient
from lookonce.commands.options import Target, Timeout, filled
from lookonce.commands.output import out
from lookonce.commands.targets import client_of, decoder_admin_targets
from lookonce.errors import DeadlineError
from lookonce.local.cli_settings import CliSettings

Name = Annotated[str, typer.Argument(help="Name of the adapter in requests.")]
DecoderAdmin = Annotated[
    str | None,
    typer.Option(
        help="host:port of a decoder's operators' calls (its admin_listen). Default: all decoders of the running "
        "`lookonce up`.",
        callback=filled,
    ),
]


def names(*, target: Target = None, timeout_s: Timeout = 60.0) -> None:
    """List the adapters that a decoder serves."""
    with client_of(target) as client:
        _show(client.model_info(fresh=True, timeout_s=timeout_s).adapters)


def load(name: Name, *, target: DecoderAdmin = None, timeout_s: Timeout = 60.0) -> None:
    """Load the adapter in the folder NAME of a decoder's adapters_folder. Each decoder of a fleet is told by itself.

    The token needs the role operator.
    """
    for decoder in decoder_admin_targets(target):
        with _connect(decoder) as admin:
            _show(admin.load_adapter(name, timeout_s=timeout_s))


def unload(name: Name, *, target: DecoderAdmin = None, timeout_s: Timeout = 60.0) -> None:
    """Free an adapter of a decoder when the last request for it has ended.

    If the deadline comes first, the adapter is served again. The token needs the role operator.
    """
    for decoder in decoder_admin_targets(target):
        with _connect(decoder) as admin:
            try:
                _show(admin.unload_adapter(name, timeout_s=timeout_s))
            except DeadlineError:
                raise DeadlineError(
                    f"requests still have {name} after {timeout_s:g} s, so it is served again; give a longer "
                    "--timeout-s"
                ) from None


def _show(adapters: Sequence[str]) -> None:
    out.print(f"adapters: {', '.join(adapters) or 'none'}", highlight=False, soft_wrap=True)


def _connect(target: str) -> AdminClient:
    return AdminClient.connect(target, **CliSettings().connection())
