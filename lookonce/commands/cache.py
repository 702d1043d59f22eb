"""`lookonce evict`: the operators' calls of an encoder."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from lookonce.admin.client import AdminClient
from lookonce.commands.options import Timeout, filled, tenant_name
from lookonce.commands.output import out, print_report
from lookonce.commands.pictures import named_image
from lookonce.commands.targets import admin_target
from lookonce.local.cli_settings import CliSettings


def evict(
    images: Annotated[
        list[str] | None, typer.Argument(help="Image files, or SHA-256 digests of 64 hex characters.", metavar="IMAGES")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="host:port of an encoder's operators' calls. "
            "Default: LOOKONCE_ADMIN_TARGET, else the running `lookonce up`.",
            callback=filled,
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant that the images belong to. Default: the default tenant.", callback=tenant_name),
    ] = None,
    all_of_tenant: Annotated[bool, typer.Option("--all-of-tenant", help="Remove all images of the tenant.")] = False,
    timeout_s: Timeout = 60.0,
) -> None:
    """Remove images from all caches: of every model, and as frames of videos. Files are hashed here, not sent.

    Exit status 0 says that the images are forgotten. The token needs the role operator.
    """
    if bool(images) == all_of_tenant:
        raise typer.BadParameter("give images, or --all-of-tenant")
    refs = [named_image(image) for image in images or []]
    with AdminClient.connect(admin_target(target), **CliSettings().connection()) as admin:
        if all_of_tenant:
            out.print(f"{admin.evict_tenant(tenant or '', timeout_s=timeout_s)} entries removed")
            return
        evicted = admin.evict(refs, tenant=tenant or "", timeout_s=timeout_s)
    table = Table("image", "digest", "found", "entries removed", "video pairs removed")
    for name, one in zip(images or [], evicted, strict=True):
        counts = ("yes" if one.found else "no", str(one.entries), str(one.pairs))
        table.add_row(escape(pathlib.Path(name).name), one.image.hex[:16], *counts)
    print_report(table)
