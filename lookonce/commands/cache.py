"""`lookonce cache`: the operators' calls of an encoder, which need a token of the role operator where tokens are."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from lookonce.admin.client import AdminClient
from lookonce.admin.results import TierStats
from lookonce.commands.options import AsJson, BesideOthers, MaxPixels, Timeout, filled, tenant_name
from lookonce.commands.output import digest_cell, out, print_json, print_rows, say
from lookonce.commands.pictures import named_image
from lookonce.commands.targets import admin_target
from lookonce.images import ImageRef
from lookonce.local.cli_settings import CliSettings

_MIB = 1 << 20

ImageNames = Annotated[
    list[str], typer.Argument(help="Image files, or SHA-256 digests of 64 hex characters.", metavar="FILE|DIGEST...")
]
AdminTarget = Annotated[
    str | None,
    typer.Option(
        help="host:port of an encoder's operators' calls. Default: LOOKONCE_ADMIN_TARGET, else the running "
        "`lookonce up`.",
        callback=filled,
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(help="Tenant that the images belong to. Default: the default tenant.", callback=tenant_name),
]


def stats(target: AdminTarget = None, as_json: AsJson = False, timeout_s: Timeout = 60.0) -> None:
    """Show the counters of the cache in one encoder and of the shared cache.

    Hits and misses are those of the encoder that answers, since its start. Scans all names in the shared cache.
    """
    with _connect(target) as admin:
        found = admin.stats(timeout_s=timeout_s)
    if as_json:
        print_json(asdict(found))
        return
    titles = ("cache", "entries", "size", "capacity", "hits", "misses", "hit ratio", "evictions")
    print_rows(titles, [_tier("local", found.local), _tier("shared", found.shared)])


def _tier(name: str, tier: TierStats) -> tuple[str, ...]:
    num_queries = tier.hits + tier.misses
    ratio = f"{tier.hits / num_queries:.1%}" if num_queries else "-"
    capacity = f"{tier.capacity_bytes / _MIB:.1f} MiB" if tier.capacity_bytes else "-"
    counts = (str(tier.hits), str(tier.misses), ratio, str(tier.evictions))
    return name, str(tier.entries), f"{tier.size_bytes / _MIB:.1f} MiB", capacity, *counts


def evict(
    images: Annotated[
        list[str] | None,
        typer.Argument(help="Image files, or SHA-256 digests of 64 hex characters.", metavar="FILE|DIGEST..."),
    ] = None,
    target: AdminTarget = None,
    tenant: Tenant = None,
    all_of_tenant: Annotated[bool, typer.Option("--all-of-tenant", help="Remove all images of the tenant.")] = False,
    timeout_s: Timeout = 60.0,
) -> None:
    """Remove images from all caches: of every model, and as frames of videos. Files are hashed here, not sent.

    Exit status 0 says that the images are forgotten. The token needs the role operator.
    """
    if bool(images) == all_of_tenant:
        raise typer.BadParameter("give images, or --all-of-tenant")
    refs = [named_image(image) for image in images or []]
    with _connect(target) as admin:
        if all_of_tenant:
            out.print(f"{admin.evict_tenant(tenant or '', timeout_s=timeout_s)} entries removed")
            return
        evicted = admin.evict(refs, tenant=tenant or "", timeout_s=timeout_s)
    rows = [
        (pathlib.Path(name).name, digest_cell(one.image.hex), "yes" if one.found else "no", one.entries, one.pairs)
        for name, one in zip(images or [], evicted, strict=True)
    ]
    print_rows(("image", "digest", "found", "entries removed", "video pairs removed"), rows)


def pin(
    images: ImageNames,
    target: AdminTarget = None,
    tenant: Tenant = None,
    max_pixels: MaxPixels = None,
    beside_others: BesideOthers = False,
    timeout_s: Timeout = 60.0,
) -> None:
    """Keep images in the shared cache until they are unpinned or removed.

    Exit status 1 says that the shared cache lacks one of them; encode it first.
    """
    refs = [named_image(image, max_pixels, beside_others) for image in images]
    with _connect(target) as admin:
        found = admin.pin(refs, tenant=tenant or "", timeout_s=timeout_s)
    _print_found(images, refs, found, "pinned")
    if not all(found):
        say(f"{found.count(False)} of {len(found)} images are not in the shared cache; `lookonce encode` adds them")
        raise typer.Exit(1)


def unpin(
    images: ImageNames,
    target: AdminTarget = None,
    tenant: Tenant = None,
    max_pixels: MaxPixels = None,
    beside_others: BesideOthers = False,
    timeout_s: Timeout = 60.0,
) -> None:
    """Let pinned images expire again. One that the shared cache lacks is no error."""
    refs = [named_image(image, max_pixels, beside_others) for image in images]
    with _connect(target) as admin:
        found = admin.pin(refs, tenant=tenant or "", unpin=True, timeout_s=timeout_s)
    _print_found(images, refs, found, "unpinned")


def _print_found(names: Sequence[str], refs: Sequence[ImageRef], found: Sequence[bool], title: str) -> None:
    rows = zip(names, refs, found, strict=True)
    print_rows(
        ("image", "digest", title),
        [
            (pathlib.Path(name).name, digest_cell(ref.hex), "yes" if was_found else "not cached")
            for name, ref, was_found in rows
        ],
    )


def _connect(target: str | None) -> AdminClient:
    return AdminClient.connect(admin_target(target), **CliSettings().connection())
