"""Options that several commands have, and checks of what users write. Calls no server."""

from __future__ import annotations

from typing import Annotated

import typer

from lookonce.identity import TENANT_NAME

# Largest values of the contract's fields.
MAX_UINT32, MAX_UINT64 = 2**32 - 1, 2**64 - 1


def filled(value: str | None) -> str | None:
    """Refuses an empty value, which a script with an unset variable gives. It would mean another server or tenant."""
    if value is not None and not value.strip():
        raise typer.BadParameter("is empty; give a value, or leave the flag out")
    return utf8(value)


def utf8(value: str | None) -> str | None:
    """Refuses a text of the command line that is not UTF-8, which no call could carry."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("is no text in UTF-8") from None
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
System = Annotated[
    str | None, typer.Option(help="System prompt: instructions that come before the chat.", callback=utf8)
]
ImageNames = Annotated[
    list[str] | None,
    typer.Option(
        "--image", "-i", metavar="FILE|DIGEST", help="Image file, or the SHA-256 digest of a cached one; repeatable."
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_UINT32, help="Largest number of pixels of an image after resizing, where models offer it."
    ),
]
BesideOthers = Annotated[
    bool,
    typer.Option(
        "--beside-others",
        help="Take the rows for prompts that show several images, in models where they differ (LLaVA-OneVision).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
