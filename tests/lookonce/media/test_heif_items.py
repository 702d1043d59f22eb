"""The structure of HEIF files is read within bounds, and without any library."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from lookonce.errors import ImageDecodeLimitError, ImageUndecodableError
from lookonce.media import heif_items
from lookonce.media.boxes import MAX_ENTRIES
from lookonce.media.heif_items import is_heif, read_items
from lookonce.media.heif_picture import read_picture
from lookonce.media.image_header import ImageLimits, probe_image
from tests import heif_files, image_bombs, image_files

LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=50_000_000, max_aspect=200.0)


def item(*further: bytes) -> heif_files.Item:
    return heif_files.avif_item(image_files.noise(1, 64, 64), *further)


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis"])
def test_the_brand_tells_a_heif_file(brand: bytes) -> None:
    assert is_heif(struct.pack(">I4s4s", 16, b"ftyp", brand) + bytes(4))
    assert is_heif(struct.pack(">I4s4sI4s", 20, b"ftyp", b"xxxx", 0, brand))
    assert not is_heif(struct.pack(">I4s4s", 16, b"ftyp", b"isom") + bytes(4) + brand)
    assert not is_heif(b"")
    assert not is_heif(brand)


def test_items_properties_and_references_are_those_of_the_file() -> None:
    tile = item()
    file = heif_files.heif(
        [heif_files.grid_item(2, 1, 128, 64), tile, tile, heif_files.exif_item(1)], [(b"dimg", 1, [2, 3])]
    )
    items = read_items(file)
    assert items.primary_id == 1
    assert [items.kind(number) for number in (1, 2, 3, 4)] == [b"grid", b"av01", b"av01", b"Exif"]
    assert items.referred(b"dimg", 1) == [2, 3]
    assert [file[start:end] for start, end in items.spans(3)] == [tile.content]
    assert {one.kind for one in items.properties(2)} == {b"av1C", b"ispe", b"pixi", b"colr"}
    picture = read_picture(file)
    assert (picture.width, picture.height, picture.num_columns, len(picture.tiles)) == (128, 64, 2, 2)


def test_boxes_with_long_lengths_are_read() -> None:
    good = heif_files.heif([item()], in_idat=True)
    start = good.index(b"meta") - 4
    content = good[start + 8 :]
    long = good[:start] + struct.pack(">I4sQ", 1, b"meta", len(content) + 16) + content
    to_the_end = good[:start] + struct.pack(">I4s", 0, b"meta") + content
    for data in (long, to_the_end):
        assert probe_image(data, LIMITS) == probe_image(good, LIMITS)


def test_an_encrypted_image_is_refused() -> None:
    good = heif_files.heif([item()])
    place = good.index(b"av01") - 2
    assert probe_image(good, LIMITS).width == 64
    with pytest.raises(ImageUndecodableError):
        probe_image(good[:place] + b"\0\1" + good[place + 2 :], LIMITS)


@pytest.mark.parametrize("kind", [b"pitm", b"iinf", b"iloc", b"iprp", b"meta", b"ispe", b"av1C"])
def test_a_file_without_a_needed_box_is_refused(kind: bytes) -> None:
    good = heif_files.heif([item()])
    with pytest.raises(ImageUndecodableError):
        probe_image(good.replace(kind, b"free"), LIMITS)


def items_with_all_properties(num_items: int) -> bytes:
    return heif_files.heif([item(), *[heif_files.Item(b"av01", b"x", [heif_files.size(1, 1)] * 200)] * num_items])


def a_grid_of_tiles_with_large_properties() -> bytes:
    """400 tiles, each with 20 properties of 40 kB."""
    large = [heif_files.box(b"free", bytes([index]) * 40_000) for index in range(20)]
    tile = item(*large)
    content = struct.pack(">BBBBHH", 0, 0, 19, 19, 20 * 64, 20 * 64)
    grid = heif_files.Item(b"grid", content, [heif_files.size(20 * 64, 20 * 64)])
    return heif_files.heif([grid, *[tile] * 400], [(b"dimg", 1, range(2, 402))])


@pytest.mark.parametrize(
    "make",
    [
        lambda: image_bombs.avif_of_blocks(3 << 20),
        lambda: image_bombs.avif_of_items(20_000),
        lambda: items_with_all_properties(1000),
        lambda: heif_files.heif([item()], [(b"cdsc", 1, [1] * 6000)] * 2),
        lambda: heif_files.heif([item(heif_files.box(b"free", bytes(2 << 20)))]),
    ],
)
def test_more_structure_than_a_picture_has_costs_no_memory(make: Callable[[], bytes]) -> None:
    data = make()
    before = psutil.Process().memory_info().rss
    with pytest.raises(ImageDecodeLimitError, match=rf"{MAX_ENTRIES} entries|1048576 bytes"):
        probe_image(data, LIMITS)
    assert psutil.Process().memory_info().rss - before < 16 << 20


def test_large_properties_of_many_tiles_are_not_copied() -> None:
    data = a_grid_of_tiles_with_large_properties()
    before = psutil.Process().memory_info().rss
    assert probe_image(data, LIMITS).width == 20 * 64
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_reading_a_header_loads_no_library_that_decodes() -> None:
    """The services read headers in their own processes, where a crash would end all requests."""
    program = """
import sys
from lookonce.media.image_header import ImageLimits, probe_image
header = probe_image(sys.stdin.buffer.read(), ImageLimits(1 << 20, 1_000_000, 50.0))
print(header.format.value, "PIL._avif" in sys.modules, "pillow_heif" in sys.modules)
"""
    data = heif_files.heif([item()])
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().split() == ["AVIF", "False", "False"]


@pytest.mark.parametrize("turn", [heif_files.rotation(1), heif_files.mirror(0), heif_files.crop(32, 32)])
def test_a_grid_of_tiles_that_are_turned_by_themselves_is_refused(turn: bytes) -> None:
    """Decoders differ in what they do with them, so the picture could be a wrong one."""
    grid, tile = heif_files.grid_item(2, 1, 128, 64), item(turn)
    with pytest.raises(ImageUndecodableError, match="not supported"):
        read_picture(heif_files.heif([grid, tile, tile], [(b"dimg", 1, [2, 3])]))


def test_opacity_is_turned_as_its_picture_is_or_not_at_all() -> None:
    turn = heif_files.rotation(1)

    def file(*of_opacity: bytes) -> bytes:
        return heif_files.heif([item(turn), item(heif_files.alpha_mark(), *of_opacity)], [(b"auxl", 2, [1])])

    for fine in (file(), file(turn)):
        assert read_picture(fine).tiles[0].alpha is not None
    with pytest.raises(ImageUndecodableError, match="not supported"):
        read_picture(file(heif_files.rotation(2)))


def test_pixels_count_as_often_as_they_are_decoded() -> None:
    """A small part of a large picture costs as much as all of it, and opacity is a picture of its own."""
    cropped = heif_files.heif([item(heif_files.crop(40, 32))])
    header = probe_image(cropped, LIMITS)
    assert (header.width, header.height, header.num_pixels) == (40, 32, 64 * 64)
    transparent = heif_files.heif([item(), item(heif_files.alpha_mark())], [(b"auxl", 2, [1])])
    assert probe_image(transparent, LIMITS).num_pixels == 2 * 64 * 64


def test_a_property_is_read_once_however_often_items_refer_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads = 0
    marks_opacity = heif_items._marks_opacity

    def counted(*arguments: Any) -> bool:
        nonlocal num_reads
        num_reads += 1
        return marks_opacity(*arguments)

    monkeypatch.setattr(heif_items, "_marks_opacity", counted)
    further = heif_files.Item(b"av01", b"", [heif_files.box(b"free", bytes([number])) for number in range(30)])
    file = heif_files.heif([item(), further], [(b"auxl", 2, [1] * 900)] * 2)
    assert read_picture(file).tiles[0].alpha is None
    assert num_reads < 100
