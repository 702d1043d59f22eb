"""`lookonce adapters`: the operators' calls of a decoder about its LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lookonce.admin.client import AdminClient
from lookonce.commands.options import Timeout, filled
from lookonce.commands.output import out
from lookonce.errors import DeadlineError
from lookonce.local.cli_settings import CliSettings

Name = Annotated[str, typer.Argument(help="Name of the adapter in requests.")]
DecoderAdmin = Annotated[
    str, typer.Option(help="host:port of a decoder's operators' calls (its admin_listen).", callback=filled)
]


def load(name: Name, *, target: DecoderAdmin, timeout_s: Timeout = 60.0) -> None:
    """Load the adapter in the folder NAME of a decoder's adapters_folder. Each decoder of a fleet is told by itself.

    The token needs the role operator.
    """
    with _connect(target) as admin:
        _show(admin.load_adapter(name, timeout_s=timeout_s))


def unload(name: Name, *, target: DecoderAdmin, timeout_s: Timeout = 60.0) -> None:
    """Free an adapter of a decoder when the last request for it has ended.

    If the deadline comes first, the adapter is served again. The token needs the role operator.
    """
    with _connect(target) as admin:
        try:
            _show(admin.unload_adapter(name, timeout_s=timeout_s))
        except DeadlineError:
            raise DeadlineError(
                f"requests still have {name} after {timeout_s:g} s, so it is served again; give a longer --timeout-s"
            ) from None


def _show(names: Sequence[str]) -> None:
    out.print(f"adapters: {', '.join(names) or 'none'}", highlight=False, soft_wrap=True)


def _connect(target: str) -> AdminClient:
    return AdminClient.connect(target, **CliSettings().connection())
