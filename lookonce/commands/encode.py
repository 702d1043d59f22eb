"""`lookonce encode` and `lookonce lookup`: put images into the cache ahead of time, and ask whether they are there."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from lookonce.commands.options import Images, Target, Timeout
from lookonce.commands.output import out
from lookonce.commands.targets import client_of
from lookonce.images import ImageRef


def encode(images: Images, target: Target = None, timeout_s: Timeout = 120.0) -> None:
    """Encode the images that are not cached yet."""
    with client_of(target) as client:
        refs = client.encode(images, timeout_s=timeout_s)
    table = Table("image", "digest", "rows", "source", "model time")
    for path, ref in zip(images, refs, strict=True):
        assert ref.encoding is not None, "encode fills it in"
        time_ms = f"{ref.encoding.compute_time_s * 1000:.0f} ms"
        table.add_row(escape(path.name), ref.hex[:16], str(ref.encoding.num_rows), ref.encoding.source, time_ms)
    out.print(table)


def lookup(images: Images, target: Target = None, timeout_s: Timeout = 120.0) -> None:
    """Show which images are cached. Uploads nothing."""
    with client_of(target) as client:
        refs = [ImageRef.from_file(path) for path in images]
        found = client.lookup(refs, timeout_s=timeout_s)
    table = Table("image", "digest", "cached")
    for path, ref, is_cached in zip(images, refs, found, strict=True):
        table.add_row(escape(path.name), ref.hex[:16], "yes" if is_cached else "no")
    out.print(table)
