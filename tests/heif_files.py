"""HEIF files for tests, put together box by box, without the code under test."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import PIL.Image

from tests import image_files

_DESCRIPTIVE = (b"ispe", b"pixi", b"colr", b"auxC", b"free")
_ALPHA = b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0"


@dataclass(frozen=True)
class Item:
    """One item: its type, its content and the boxes of its properties."""

    kind: bytes
    content: bytes
    properties: Sequence[bytes] = ()


def box(kind: bytes, content: bytes) -> bytes:
    """A box of a kind."""
    return struct.pack(">I4s", 8 + len(content), kind) + content


def full_box(kind: bytes, content: bytes, version: int = 0) -> bytes:
    """A box that begins with a version and flags."""
    return box(kind, bytes([version, 0, 0, 0]) + content)


def heif(
    items: Sequence[Item],
    references: Sequence[tuple[bytes, int, Sequence[int]]] = (),
    *,
    primary: int = 1,
    brand: bytes = b"avif",
    in_idat: bool = False,
) -> bytes:
    """A file of items 1, 2, …; a reference is (kind, item, its targets). Contents are in `mdat`, or in `idat`."""
    head = box(b"ftyp", brand + bytes(4) + b"mif1" + brand)
    contents = b"".join(item.content for item in items)
    start = 0 if in_idat else len(head) + len(_meta(items, references, primary, 0, contents, in_idat)) + 8
    meta = _meta(items, references, primary, start, contents, in_idat)
    return head + meta + (b"" if in_idat else box(b"mdat", contents))


def _meta(
    items: Sequence[Item],
    references: Sequence[tuple[bytes, int, Sequence[int]]],
    primary: int,
    start: int,
    contents: bytes,
    in_idat: bool,
) -> bytes:
    numbers = range(1, len(items) + 1)
    infos = [
        full_box(b"infe", struct.pack(">HH4sx", number, 0, item.kind), 2)
        for number, item in zip(numbers, items, strict=True)
    ]
    places = b""
    for number, item in zip(numbers, items, strict=True):
        places += struct.pack(">HHHHII", number, int(in_idat), 0, 1, start, len(item.content))
        start += len(item.content)
    properties = list(dict.fromkeys(one for item in items for one in item.properties))
    marked = b""
    for number, item in zip(numbers, items, strict=True):
        indexes = [_mark(one) | properties.index(one) + 1 for one in item.properties]
        marked += struct.pack(f">HB{len(indexes)}H", number, len(indexes), *indexes)
    associations = box(b"ipma", b"\0\0\0\1" + struct.pack(">I", len(items)) + marked)
    pointers = [box(kind, struct.pack(f">HH{len(to)}H", item, len(to), *to)) for kind, item, to in references]
    return full_box(
        b"meta",
        full_box(b"hdlr", bytes(4) + b"pict" + bytes(13))
        + full_box(b"pitm", struct.pack(">H", primary))
        + full_box(b"iloc", b"\x44\0" + struct.pack(">H", len(items)) + places, 1)
        + full_box(b"iinf", struct.pack(">H", len(items)) + b"".join(infos))
        + box(b"iprp", box(b"ipco", b"".join(properties)) + associations)
        + full_box(b"iref", b"".join(pointers))
        + (box(b"idat", contents) if in_idat else b""),
    )


def _mark(property_: bytes) -> int:
    """The bit of an essential property, which a decoder must understand."""
    return 0 if property_[4:8] in _DESCRIPTIVE else 0x8000


def size(width: int, height: int) -> bytes:
    """The property that holds an item's size."""
    return full_box(b"ispe", struct.pack(">II", width, height))


def rotation(quarters: int) -> bytes:
    """A turn of so many quarters against the clock."""
    return box(b"irot", bytes([quarters]))


def mirror(axis: int) -> bytes:
    """Exchanges top and bottom (0), or left and right (1)."""
    return box(b"imir", bytes([axis]))


def crop(width: int, height: int, x: tuple[int, int] = (0, 1), y: tuple[int, int] = (0, 1)) -> bytes:
    """A part of a size, whose centre is moved by fractions of a pixel."""
    return box(b"clap", struct.pack(">8i", width, 1, height, 1, *x, *y))


def avif_item(image: PIL.Image.Image, *further: bytes, claimed: tuple[int, int] | None = None) -> Item:
    """A picture as AV1, nearly without loss. `claimed` is the size that its property names instead of the true one."""
    options = {"quality": 100, "subsampling": "4:4:4", "speed": 9}
    if image.mode == "L":
        options["subsampling"] = "4:0:0"
    return coded_item(image_files.encoded(image, "AVIF", **options), b"av01", *further, claimed=claimed)


def coded_item(file: bytes, kind: bytes, *further: bytes, claimed: tuple[int, int] | None = None) -> Item:
    """The only item of a file that a library wrote, with further properties."""
    kinds = [b"av1C", b"hvcC", b"pixi", b"colr"]
    own = [_box_in(file, name) for name in kinds if name in file]
    own_size = _box_in(file, b"ispe") if claimed is None else size(*claimed)
    return Item(kind, _box_in(file, b"mdat")[8:], [*own, own_size, *further])


def grid_item(num_columns: int, num_rows: int, width: int, height: int, *further: bytes) -> Item:
    """An image that is made of tiles, row by row."""
    content = struct.pack(">BBBBHH", 0, 0, num_rows - 1, num_columns - 1, width, height)
    return Item(b"grid", content, [size(width, height), *further])


def alpha_mark() -> bytes:
    """The property of an item that is another item's opacity."""
    return full_box(b"auxC", _ALPHA)


def exif_item(orientation: int) -> Item:
    """EXIF with nothing but an orientation."""
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return Item(b"Exif", struct.pack(">I", 0) + exif.tobytes().removeprefix(b"Exif\0\0"))


def _box_in(file: bytes, kind: bytes) -> bytes:
    start = file.index(kind) - 4
    return file[start : start + int.from_bytes(file[start : start + 4], "big")]
