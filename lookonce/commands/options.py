"""Options that several commands have, and checks of what users write. Calls no server."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from lookonce.errors import InvalidParameterError
from lookonce.identity import TENANT_NAME
from lookonce.images import ImageRef

# Largest values of the contract's fields.
MAX_UINT32, MAX_UINT64 = 2**32 - 1, 2**64 - 1


def filled(value: str | None) -> str | None:
    """Refuses an empty value, which a script with an unset variable gives. It would mean another server or tenant."""
    if value is not None and not value.strip():
        raise typer.BadParameter("is empty; give a value, or leave the flag out")
    return value


def tenant_name(value: str | None) -> str | None:
    """Refuses an empty value, and a name that no tenant can have: nothing of it could be found or removed."""
    if filled(value) is not None and not TENANT_NAME.fullmatch(value or ""):
        raise typer.BadParameter(f"no tenant can have this name; it must match {TENANT_NAME.pattern}")
    return value


Target = Annotated[
    str | None,
    typer.Option(
        help="host:port of the decoder. Default: LOOKONCE_TARGET, else the running `lookonce up`.", callback=filled
    ),
]
Timeout = Annotated[float, typer.Option("--timeout-s", min=0.1, help="Deadline of the call, seconds; inf: none.")]
Images = Annotated[list[pathlib.Path], typer.Argument(help="Image files.", exists=True, dir_okay=False)]


def named_image(text: str) -> ImageRef:
    """Returns the image of a file or a digest. Raises BadParameter for anything else."""
    path = pathlib.Path(text)
    if path.is_file():
        return ImageRef.from_file(path)
    if text and path.is_dir():
        raise typer.BadParameter(f"{text} is a folder; name the image files in it")
    try:
        return ImageRef.from_digest(text)
    except InvalidParameterError:
        raise typer.BadParameter(
            f"{text or repr(text)} is neither a file nor a SHA-256 digest of 64 hex characters"
        ) from None
