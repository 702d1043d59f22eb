"""`lookonce encode` and `lookonce lookup`: put images into the cache ahead of time, and ask whether they are there."""

from __future__ import annotations

import pathlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lookonce.commands.options import BesideOthers, MaxPixels, Target, Timeout
from lookonce.commands.output import digest_cell, err, out, print_line, print_rows, say
from lookonce.commands.pictures import existing_file, existing_path, files_below, is_image
from lookonce.commands.prewarming import EncodeOptions, Prewarmed, prewarm
from lookonce.commands.targets import client_of
from lookonce.images import ImageRef

_TITLES = ("image", "digest", "rows", "source", "model time")
# The counts of the summary, by the source of the rows.
_WORDS = {
    "cache": "cached already",
    "computed": "encoded",
    "coalesced": "encoded for another call",
    "local cache": "from the encoder's cache",
    "shared cache": "from the shared cache",
    "failed": "failed",
}
# Longest list of images that a terminal shows after the progress bar.
_MAX_TABLE_ROWS = 20

Paths = Annotated[
    list[pathlib.Path],
    typer.Argument(
        help="Image files, and folders of them with all their subfolders.", metavar="FILE|DIR...", parser=existing_path
    ),
]


def encode(
    paths: Paths,
    parallel: Annotated[int, typer.Option(min=1, max=256, help="Number of calls at the same time.")] = 4,
    max_pixels: MaxPixels = None,
    beside_others: BesideOthers = False,
    target: Target = None,
    timeout_s: Timeout = 120.0,
) -> None:
    """Encode the images that are not cached yet. What was interrupted goes on where it was when it is run again.

    Files of folders that are no images are skipped. Exit status 1 says that some images failed; they are listed.
    """
    started_s = time.monotonic()
    files = _files(paths)
    options = EncodeOptions(max_pixels, beside_others, timeout_s)
    results: list[Prewarmed] = []
    if not out.is_terminal:
        print_line(_TITLES)
    with client_of(target) as client, _progress() as progress:
        task = progress.add_task("encoding", total=len(files))
        for ended in prewarm(client, files, options, parallel):
            progress.advance(task, len(ended))
            results += ended
            if not out.is_terminal:
                for one in ended:
                    _print(one)
    encoded = [one for one in results if one.encoding is not None]
    if out.is_terminal and 0 < len(encoded) <= _MAX_TABLE_ROWS:
        print_rows(_TITLES, [_cells(one) for one in encoded])
    say(f"{_summary(results)} in {time.monotonic() - started_s:.1f} s")
    failed = [one for one in results if one.encoding is None]
    for one in failed:
        say(f"failed {one.path}: {one.error}")
    if failed:
        raise typer.Exit(1)


def _files(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Returns each file once. Says which files of folders are no images; those named themselves are all taken."""
    files: dict[pathlib.Path, None] = {}
    for path in paths:
        if not path.is_dir():
            files[path] = None
            continue
        for file in files_below(path):
            if _may_be_image(file):
                files[file] = None
            else:
                say(f"skipped {file}: no image")
    return list(files)


def _may_be_image(file: pathlib.Path) -> bool:
    try:
        return is_image(file)
    except OSError:
        # The failure is counted when the file is read.
        return True


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def _print(one: Prewarmed) -> None:
    if one.encoding is not None:
        print_line(_cells(one))


def _cells(one: Prewarmed) -> tuple[str, ...]:
    assert one.encoding is not None
    encoding = one.encoding
    time_ms = f"{encoding.compute_time_s * 1000:.0f} ms"
    return str(one.path), digest_cell(one.digest), str(encoding.num_rows), encoding.source, time_ms


def _summary(results: Sequence[Prewarmed]) -> str:
    """Returns how many images there were and where their rows came from, for people."""
    counts = Counter("failed" if one.encoding is None else one.encoding.source for one in results)
    parts = [f"{count:,} {_WORDS[source]}" for source, count in counts.items()]
    number = f"{len(results):,} image" if len(results) == 1 else f"{len(results):,} images"
    return f"{number}: {', '.join(parts)}" if parts else number


def lookup(
    images: Annotated[list[pathlib.Path], typer.Argument(help="Image files.", metavar="FILE...", parser=existing_file)],
    max_pixels: MaxPixels = None,
    beside_others: BesideOthers = False,
    target: Target = None,
    timeout_s: Timeout = 120.0,
) -> None:
    """Show which images are cached. Uploads nothing."""
    with client_of(target) as client:
        refs = [ImageRef.from_file(path, max_pixels=max_pixels, beside_others=beside_others) for path in images]
        found = client.lookup(refs, timeout_s=timeout_s)
    rows = zip(images, refs, found, strict=True)
    print_rows(
        ("image", "digest", "cached"),
        [(path, digest_cell(ref.hex), "yes" if is_cached else "no") for path, ref, is_cached in rows],
    )
