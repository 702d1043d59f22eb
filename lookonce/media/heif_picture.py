"""Finds the coded pictures that make up the primary image of a HEIC or AVIF file, and how they are put together.

Only the primary image counts: thumbnails, depth maps, gain maps, further images and the frames of a sequence are never
looked at. Its orientation is that of its own properties; HEIF gives the orientation in EXIF no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

import PIL.Image

from lookonce.errors import ImageUndecodableError
from lookonce.media.boxes import Reader, broken
from lookonce.media.heif_items import Items, Property, read_items

HEVC, AV1 = b"hvc1", b"av01"
_GRID = b"grid"
_CONFIGURATION = {HEVC: b"hvcC", AV1: b"av1C"}
# Properties that a decoder needs. Others that are not essential describe the picture and do not change it.
_DECODING = frozenset({b"hvcC", b"av1C", b"ispe", b"pixi", b"auxC", b"a1op", b"lsel"})
_TRANSFORMING = frozenset({b"clap", b"irot", b"imir"})
_KNOWN = _DECODING | _TRANSFORMING | {b"colr"}
# A version and flags, with which most boxes begin.
_FLAGS_BYTES = 4
_MAX_GRID_BYTES = 12
_ROTATIONS = (None, PIL.Image.Transpose.ROTATE_90, PIL.Image.Transpose.ROTATE_180, PIL.Image.Transpose.ROTATE_270)
_MIRRORS = (PIL.Image.Transpose.FLIP_TOP_BOTTOM, PIL.Image.Transpose.FLIP_LEFT_RIGHT)
_SIDEWAYS = frozenset({PIL.Image.Transpose.ROTATE_90, PIL.Image.Transpose.ROTATE_270})


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of a picture in pixels; right and bottom are outside of it."""

    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True, slots=True)
class CodedPicture:
    """One picture as HEVC or AV1 coded it."""

    coding: bytes
    width: int
    height: int
    # The boxes that a decoder needs.
    properties: tuple[Property, ...]
    # Places of the coded pixels in the file, each as (start, end).
    spans: tuple[tuple[int, int], ...]
    # The picture's opacity, of the same size.
    alpha: CodedPicture | None = None
    is_premultiplied: bool = False


@dataclass(frozen=True, slots=True)
class HeifPicture:
    """The primary image: one coded picture, or a grid of them, row by row."""

    # Size in pixels before the transformations.
    width: int
    height: int
    num_columns: int
    tiles: tuple[CodedPicture, ...]
    # In the order in which they are applied.
    transformations: tuple[Crop | PIL.Image.Transpose, ...]

    @property
    def coding(self) -> bytes:
        """The coding of all tiles."""
        return self.tiles[0].coding

    @property
    def num_coded_pixels(self) -> int:
        """Pixels of all tiles, also those outside of the image."""
        return sum(tile.width * tile.height for tile in self.tiles)

    @property
    def num_decoded_pixels(self) -> int:
        """Pixels that a decoder computes: of all tiles and of their opacities."""
        return sum(tile.width * tile.height * (1 if tile.alpha is None else 2) for tile in self.tiles)

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height behind the transformations."""
        width, height = self.width, self.height
        for one in self.transformations:
            if isinstance(one, Crop):
                width, height = one.right - one.left, one.bottom - one.top
            elif one in _SIDEWAYS:
                width, height = height, width
        return width, height


@dataclass(frozen=True, slots=True)
class _Layout:
    size: tuple[int, int]
    num_columns: int
    tiles: tuple[CodedPicture, ...]

    @property
    def shapes(self) -> set[tuple[bytes, int, int]]:
        """Coding and size of all tiles."""
        return {(tile.coding, tile.width, tile.height) for tile in self.tiles}


def read_picture(data: bytes) -> HeifPicture:
    """Reads the structure of the primary image.

    Raises ImageUndecodableError for a file that is broken, ends before its pixels do, or is coded in another way, and
    ImageDecodeLimitError for one with more structure than a picture needs.
    """
    items = read_items(data)
    item = items.primary_id
    layout = _layout_with_alpha(items, item, ())
    transformations = _transformations(items, items.properties(item), *layout.size)
    return HeifPicture(*layout.size, layout.num_columns, layout.tiles, tuple(transformations))


def _layout_with_alpha(items: Items, item: int, colours: tuple[Property, ...]) -> _Layout:
    layout = _layout(items, item, colours)
    alpha = items.opacities.get(item)
    if alpha is None:
        return layout
    if _turns(items, alpha) not in ([], _turns(items, item)):
        raise _unsupported()
    other = _layout(items, alpha, ())
    if (other.size, other.num_columns) != (layout.size, layout.num_columns) or other.shapes != layout.shapes:
        raise _unsupported()
    is_premultiplied = alpha in items.referred(b"prem", item)
    tiles = (
        replace(tile, alpha=opacity, is_premultiplied=is_premultiplied)
        for tile, opacity in zip(layout.tiles, other.tiles, strict=True)
    )
    return replace(layout, tiles=tuple(tiles))


def _layout(items: Items, item: int, colours: tuple[Property, ...]) -> _Layout:
    """The layout of an item without its opacity; `colours` describe its samples if it does not do so itself."""
    kind, properties = items.kind(item), items.properties(item)
    if any(one.is_essential and one.kind not in _KNOWN for one in properties):
        raise _unsupported()
    size = _size(items, properties)
    colours = _colours(items, properties) or colours
    if kind == _GRID:
        return _grid(items, item, size, colours)
    if kind not in _CONFIGURATION:
        raise ImageUndecodableError(
            "the image's coding inside of its HEIF file is neither HEVC (HEIC) nor AV1 (AVIF); save it as JPEG"
        )
    if _CONFIGURATION[kind] not in {one.kind for one in properties}:
        raise broken()
    needed = tuple(one for one in properties if one.kind in _DECODING)
    return _Layout(size, 1, (CodedPicture(kind, *size, (*needed, *colours), items.spans(item)),))


def _grid(items: Items, item: int, size: tuple[int, int], colours: tuple[Property, ...]) -> _Layout:
    content = b"".join(items.data[start:end] for start, end in items.spans(item)[:1])[:_MAX_GRID_BYTES]
    reader = Reader(content, 0, len(content))
    _, flags = reader.number(1), reader.number(1)
    num_rows, num_columns = reader.number(1) + 1, reader.number(1) + 1
    num_bytes = 4 if flags & 1 else 2
    canvas_size = (reader.number(num_bytes), reader.number(num_bytes))
    targets = items.referred(b"dimg", item)
    if canvas_size != size or len(targets) != num_columns * num_rows:
        raise broken()
    if any(items.kind(target) == _GRID or _turns(items, target) for target in set(targets)):
        raise _unsupported()
    # A tile that is used often is read once.
    tiles = {target: _layout_with_alpha(items, target, colours).tiles[0] for target in set(targets)}
    layout = _Layout(size, num_columns, tuple(tiles[target] for target in targets))
    if len(layout.shapes) > 1:
        raise broken()
    first = layout.tiles[0]
    for length, side, number in ((size[0], first.width, num_columns), (size[1], first.height, num_rows)):
        # Every tile has a part of the image, and together they cover all of it.
        if not side * (number - 1) < length <= side * number:
            raise broken()
    return layout


def _turns(items: Items, item: int) -> list[bytes]:
    """The transformations of an item, as the file holds them."""
    return [one.kind + items.data[one.start : one.end] for one in items.properties(item) if one.kind in _TRANSFORMING]


def _size(items: Items, properties: list[Property]) -> tuple[int, int]:
    place = next((one for one in properties if one.kind == b"ispe"), None)
    if place is None:
        raise broken()
    reader = Reader(items.data, place.start + _FLAGS_BYTES, place.end)
    return reader.number(4), reader.number(4)


def _colours(items: Items, properties: list[Property]) -> tuple[Property, ...]:
    """The matrix and range of the samples. ICC profiles are not used."""
    return tuple(one for one in properties if one.kind == b"colr" and items.data.startswith(b"nclx", one.start))[:1]


def _transformations(
    items: Items, properties: list[Property], width: int, height: int
) -> Iterator[Crop | PIL.Image.Transpose]:
    for kind, start, end, _ in properties:
        reader = Reader(items.data, start, end)
        if kind == b"clap":
            crop = _crop(reader, width, height)
            width, height = crop.right - crop.left, crop.bottom - crop.top
            yield crop
        elif kind == b"imir":
            yield _MIRRORS[reader.number(1) & 1]
        elif kind == b"irot" and (turn := _ROTATIONS[reader.number(1) & 3]) is not None:
            if turn in _SIDEWAYS:
                width, height = height, width
            yield turn


def _crop(reader: Reader, width: int, height: int) -> Crop:
    """The clean aperture: size and centre as fractions, the centre relative to that of the picture."""
    numbers = [(reader.signed(4), reader.signed(4)) for _ in range(4)]
    if any(denominator <= 0 for _, denominator in numbers):
        raise broken()
    new_width, new_height, x_offset, y_offset = (Fraction(*number) for number in numbers)
    if new_width.denominator != 1 or new_height.denominator != 1:
        raise broken()
    left, top = floor((width - new_width) / 2 + x_offset), floor((height - new_height) / 2 + y_offset)
    crop = Crop(left, top, left + int(new_width), top + int(new_height))
    if not (0 <= left < crop.right <= width and 0 <= top < crop.bottom <= height):
        raise broken()
    return crop


def _unsupported() -> ImageUndecodableError:
    return ImageUndecodableError("the image needs a feature of HEIF that is not supported; save it as JPEG")
