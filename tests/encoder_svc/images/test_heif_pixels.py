"""Pixels of AVIF files, and of HEIF structures around them, against pictures that were known before they were coded.

The files are put together here, box by box. `test_heic.py` has the tests of files that need HEVC.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import random
import struct
from collections.abc import Callable

import numpy as np
import PIL.features
import PIL.Image
import pytest

from encoder_svc.images import decode_worker, heif_pixels
from encoder_svc.images.av1_size import check_av1_size
from encoder_svc.images.decode_worker import DecodeWorker
from encoder_svc.images.image_decoder import decode_image
from lookonce.errors import (
    ImageDecodeLimitError,
    ImageTooLargeError,
    ImageUndecodableError,
    InvalidInputError,
    LookonceError,
    UnsupportedError,
)
from lookonce.media.image_header import ImageFormat, ImageLimits, probe_image
from lookonce.process.process_clock import TimeLimits
from tests import heif_files, image_files
from tests.encoder_svc.images.decoding import LIMITS, decoded

WIDTH, HEIGHT = 48, 32
# AVIF at its best quality rounds colours in both directions.
TOLERANCE = 4
FOLDER = pathlib.Path(__file__).parent


@functools.cache
def picture(seed: int = 1, mode: str = "RGB") -> PIL.Image.Image:
    colours = image_files.noise(seed, WIDTH, HEIGHT)
    if mode != "RGBA":
        return colours.convert(mode)
    colours.putalpha(PIL.Image.linear_gradient("L").resize(colours.size))
    return colours


@functools.cache
def item(seed: int = 1, mode: str = "RGB") -> heif_files.Item:
    return heif_files.avif_item(picture(seed, mode))


def with_properties(*further: bytes) -> heif_files.Item:
    return heif_files.Item(b"av01", item().content, [*item().properties, *further])


def check(worker: DecodeWorker, data: bytes, expected: PIL.Image.Image | np.ndarray) -> None:
    found = decoded(worker, data)
    assert found.shape == np.asarray(expected).shape
    assert np.abs(found - np.asarray(expected)).max() <= TOLERANCE


def refusal(data: bytes) -> LookonceError:
    with pytest.raises(LookonceError) as caught:
        decode_image(data, LIMITS)
    return caught.value


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_a_file_of_pillow(worker: DecodeWorker, subsampling: str) -> None:
    grey = picture(1, "L").convert("RGB")
    data = image_files.encoded(grey, "AVIF", quality=100, subsampling=subsampling)
    check(worker, data, grey)
    assert probe_image(data, LIMITS).format is ImageFormat.AVIF


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_file_put_together_here(worker: DecodeWorker, mode: str) -> None:
    expected = picture(1, mode).convert("RGB")
    check(worker, heif_files.heif([item(1, mode)]), expected)
    check(worker, heif_files.heif([item(1, mode)], brand=b"mif1"), expected)
    check(worker, heif_files.heif([item(1, mode)], in_idat=True), expected)


@pytest.mark.parametrize("bits", [10, 12])
def test_samples_of_10_and_12_bits_are_scaled(worker: DecodeWorker, bits: int) -> None:
    """Another encoder made the files without loss: ramps from 0 to the largest sample."""
    top = 2**bits - 1
    y, x = np.mgrid[0:24, 0:32]
    samples = np.stack([x * top // 31, y * top // 23, (x + y) * top // 54], axis=2)
    found = decoded(worker, (FOLDER / f"ramp_{bits}_bits.avif").read_bytes())
    assert np.array_equal(found, np.rint(samples * 255 / top))


# Turns as numpy makes them.
TURNS: dict[bytes, Callable[[np.ndarray], np.ndarray]] = {
    heif_files.rotation(0): lambda pixels: pixels,
    heif_files.rotation(1): lambda pixels: np.rot90(pixels, 1),
    heif_files.rotation(2): lambda pixels: np.rot90(pixels, 2),
    heif_files.rotation(3): lambda pixels: np.rot90(pixels, 3),
    heif_files.mirror(0): np.flipud,
    heif_files.mirror(1): np.fliplr,
}


@pytest.mark.parametrize("turns", [(), *itertools.product(TURNS), *itertools.permutations(TURNS, 2)])
def test_turns_are_applied_once_in_their_order(worker: DecodeWorker, turns: tuple[bytes, ...]) -> None:
    expected = np.asarray(picture())
    for turn in turns:
        expected = TURNS[turn](expected)
    check(worker, heif_files.heif([with_properties(*turns)]), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_that_pillow_writes(worker: DecodeWorker, orientation: int) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    data = image_files.encoded(picture(), "AVIF", quality=100, subsampling="4:4:4", exif=exif)
    grid = np.asarray(picture())
    upright = [grid, np.fliplr(grid), np.rot90(grid, 2), np.flipud(grid)]
    upright += [grid.swapaxes(0, 1), np.rot90(grid, 3), np.rot90(grid, 2).swapaxes(0, 1), np.rot90(grid)]
    check(worker, data, upright[orientation - 1])


@pytest.mark.parametrize("quarters", [0, 3])
def test_the_orientation_in_exif_turns_nothing(worker: DecodeWorker, quarters: int) -> None:
    """A phone writes the turn twice: as a property of the image, which counts, and in EXIF."""
    items = [with_properties(heif_files.rotation(quarters)), heif_files.exif_item(6)]
    check(worker, heif_files.heif(items, [(b"cdsc", 2, [1])]), np.rot90(np.asarray(picture()), quarters))


def test_a_crop_comes_before_or_behind_a_turn(worker: DecodeWorker) -> None:
    grid = np.asarray(picture())
    crop = heif_files.crop(31, 20, (-17, 2), (3, 1))
    # The left edge is at (48 − 31) / 2 − 17 / 2 = 0, the upper one at (32 − 20) / 2 + 3 = 9.
    check(worker, heif_files.heif([with_properties(crop)]), grid[9:29, 0:31])
    turned = heif_files.heif([with_properties(crop, heif_files.rotation(1))])
    check(worker, turned, np.rot90(grid[9:29, 0:31]))
    behind = heif_files.heif([with_properties(heif_files.rotation(1), heif_files.crop(20, 40))])
    check(worker, behind, np.rot90(grid)[4:44, 6:26])


@pytest.mark.parametrize(
    "crop",
    [heif_files.crop(49, 32), heif_files.crop(0, 5), heif_files.crop(40, 32, (5, 1)), heif_files.crop(4, 4, (1, 0))],
)
def test_a_crop_outside_of_the_picture_is_refused(crop: bytes) -> None:
    assert isinstance(refusal(heif_files.heif([with_properties(crop)])), ImageUndecodableError)


def over_white() -> np.ndarray:
    four = np.asarray(picture(1, "RGBA")).astype(float)
    share = four[..., 3:] / 255
    return np.rint(four[..., :3] * share + 255 * (1 - share))


@pytest.mark.parametrize("is_premultiplied", [False, True])
def test_transparent_pixels_lie_over_white(worker: DecodeWorker, is_premultiplied: bool) -> None:
    data = image_files.encoded(
        picture(1, "RGBA"), "AVIF", quality=100, subsampling="4:4:4", alpha_premultiplied=is_premultiplied
    )
    check(worker, data, over_white())


def tiles(seeds: range) -> list[heif_files.Item]:
    return [item(seed) for seed in seeds]


def test_a_grid_is_cut_to_its_size(worker: DecodeWorker) -> None:
    whole = np.vstack([np.hstack([np.asarray(picture(seed)) for seed in row]) for row in ([2, 3, 4], [5, 6, 7])])
    grid = heif_files.grid_item(3, 2, 140, 50, heif_files.rotation(1))
    data = heif_files.heif([grid, *tiles(range(2, 8))], [(b"dimg", 1, range(2, 8))])
    check(worker, data, np.rot90(whole[:50, :140]))


@pytest.mark.parametrize("of_the_grid", [True, False])
def test_the_opacity_of_a_grid(worker: DecodeWorker, of_the_grid: bool) -> None:
    """The opacity belongs to the whole grid and is a grid itself, or belongs to each tile."""
    alpha = picture(1, "RGBA").getchannel("A")
    opacity = heif_files.avif_item(alpha, heif_files.alpha_mark())
    colours = heif_files.avif_item(picture(1, "RGBA").convert("RGB"))
    items = [heif_files.grid_item(2, 1, 96, 32), colours, colours, opacity, opacity]
    references: list[tuple[bytes, int, list[int]]] = [(b"dimg", 1, [2, 3])]
    if of_the_grid:
        items.append(heif_files.grid_item(2, 1, 96, 32, heif_files.alpha_mark()))
        references += [(b"dimg", 6, [4, 5]), (b"auxl", 6, [1])]
    else:
        references += [(b"auxl", 4, [2]), (b"auxl", 5, [3])]
    check(worker, heif_files.heif(items, references), np.hstack([over_white(), over_white()]))


def test_only_the_primary_image_counts(worker: DecodeWorker) -> None:
    items = tiles(range(2, 5))
    for primary in (1, 2, 3):
        data = heif_files.heif(items, [(b"thmb", 3, [1]), (b"auxl", 2, [1])], primary=primary)
        check(worker, data, picture(primary + 1))


def test_a_further_image_that_is_broken_does_no_harm(worker: DecodeWorker) -> None:
    broken = heif_files.Item(b"av01", b"nothing", [heif_files.size(1 << 30, 1 << 30)])
    check(worker, heif_files.heif([broken, item()], primary=2), picture())


def test_the_first_frame_of_an_animation_counts(worker: DecodeWorker) -> None:
    data = image_files.encoded(
        picture(), "AVIF", quality=100, subsampling="4:4:4", save_all=True, append_images=[picture(2)], duration=50
    )
    assert data[8:12] == b"avis"
    check(worker, data, picture())


def a_grid(*further: heif_files.Item, num_columns: int = 2, width: int = 90) -> bytes:
    """A grid of one row whose tiles are the further items."""
    targets = range(2, 2 + len(further))
    return heif_files.heif([heif_files.grid_item(num_columns, 1, width, 32), *further], [(b"dimg", 1, targets)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: heif_files.heif([item(1)]),
        lambda: heif_files.heif([item(1)], in_idat=True),
        lambda: a_grid(item(1), item(2)),
        lambda: image_files.encoded(picture(1, "RGBA"), "AVIF"),
    ],
)
def test_a_file_cut_anywhere_is_refused(make: Callable[[], bytes]) -> None:
    data = make()
    decode_image(data, LIMITS)
    for cut in range(0, len(data), 7):
        assert isinstance(refusal(data[:cut]), ImageUndecodableError)
        with pytest.raises(ImageUndecodableError):
            probe_image(data[:cut], LIMITS)


@pytest.mark.parametrize("num_bytes", [1, 15, 200, -10])
def test_a_grid_with_a_tile_that_lacks_its_end_is_refused(num_bytes: int) -> None:
    good = item(2)
    broken = heif_files.Item(b"av01", good.content[:num_bytes], good.properties)
    assert isinstance(refusal(a_grid(item(1), broken)), ImageUndecodableError)


@pytest.mark.parametrize(
    "data",
    [
        # One tile too few, too many, none at all, and two that do not cover the image.
        lambda: a_grid(item(1)),
        lambda: a_grid(item(1), item(2), item(3)),
        lambda: a_grid(),
        lambda: a_grid(item(1), item(2), width=97),
        lambda: a_grid(item(1), item(2), width=48),
        lambda: a_grid(item(1), heif_files.avif_item(image_files.noise(1, 50, 32))),
        # A grid of grids, and one of itself.
        lambda: heif_files.heif([heif_files.grid_item(1, 1, 48, 32)], [(b"dimg", 1, [1])]),
        # Codings that are not accepted, and a property with an unknown effect.
        lambda: heif_files.heif([heif_files.Item(b"jpeg", b"\xff\xd8\xff", [heif_files.size(9, 9)])]),
        lambda: heif_files.heif([heif_files.Item(b"iden", b"x", [heif_files.size(9, 9)])]),
        lambda: heif_files.heif([with_properties(heif_files.box(b"xyzw", b""))]),
        lambda: heif_files.heif([item()], primary=2),
        lambda: heif_files.heif([heif_files.Item(b"av01", item().content)]),
    ],
)
def test_a_structure_that_makes_no_picture_is_refused(data: Callable[[], bytes]) -> None:
    assert isinstance(refusal(data()), ImageUndecodableError)


@pytest.mark.parametrize("claimed", [(8, 8), (WIDTH, HEIGHT + 1), (1000, 1000)])
def test_a_picture_that_has_another_size_than_it_claims_is_refused(claimed: tuple[int, int]) -> None:
    """The library would scale it, after decoding any number of pixels."""
    error = refusal(heif_files.heif([heif_files.avif_item(picture(), claimed=claimed)]))
    assert isinstance(error, ImageUndecodableError)
    assert "another size" in error.message


def test_a_second_sequence_header_is_read_too() -> None:
    large = heif_files.avif_item(image_files.noise(1, 64, 64))
    check_av1_size(item().content, (WIDTH, HEIGHT))
    with pytest.raises(ImageUndecodableError):
        check_av1_size(item().content + large.content, (WIDTH, HEIGHT))


@pytest.mark.parametrize(
    ("claimed", "parts"),
    [
        ((40_000, 40_000), ["40000 × 40000", "50000000"]),
        ((0xFFFFFFFF, 0xFFFFFFFF), ["50000000"]),
        ((2010, 10), ["201 times", "200"]),
        ((0, 10), ["0 × 10"]),
    ],
)
def test_a_claimed_size_is_checked_before_anything_is_decoded(claimed: tuple[int, int], parts: list[str]) -> None:
    data = heif_files.heif([heif_files.avif_item(picture(), claimed=claimed)])
    with pytest.raises(ImageTooLargeError) as caught:
        probe_image(data, LIMITS)
    for part in parts:
        assert part in caught.value.message


def test_tiles_of_many_pixels_outside_of_the_image_are_refused() -> None:
    """One column of tiles, each of almost all pixels that an image may have, of which the image shows a few."""
    tile = heif_files.avif_item(picture(), claimed=(1000, 50))
    numbers = range(2, 202)
    grid = heif_files.Item(b"grid", struct.pack(">BBBBHH", 0, 0, 199, 0, 50, 10_000), [heif_files.size(50, 10_000)])
    data = heif_files.heif([grid, *[tile] * 200], [(b"dimg", 1, numbers)])
    with pytest.raises(ImageTooLargeError, match="10000000"):
        probe_image(data, ImageLimits(20 << 20, 4_000_000, 300.0))


def test_an_image_that_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_worker, "memory_limit", lambda limits: 256 << 20)
    worker = DecodeWorker(LIMITS, TimeLimits(60.0, 120.0))
    large = image_files.encoded(PIL.Image.new("RGB", (6000, 5000)), "AVIF", speed=10)
    with pytest.raises(ImageDecodeLimitError, match="memory"):
        worker.decode(large)
    check(worker, heif_files.heif([item()]), picture())
    worker.close()


def test_the_libraries_get_nothing_but_the_coded_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[bytes] = []

    def keep(file: bytes) -> PIL.Image.Image:
        files.append(file)
        return picture()

    monkeypatch.setattr(heif_pixels, "_decoded_avif", keep)
    secret = heif_files.Item(b"mime", b"a secret place", [])
    decode_image(heif_files.heif([item(), heif_files.exif_item(6), secret], [(b"cdsc", 2, [1])]), LIMITS)
    (file,) = files
    assert item().content in file
    assert b"Exif" not in file
    assert b"secret" not in file


def test_a_pillow_without_avif_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.features, "check", lambda feature: False)
    error = refusal(heif_files.heif([item()]))
    assert isinstance(error, UnsupportedError)
    assert "AVIF" in error.message
    assert "pip install pillow" in error.message


def mutated(data: bytes, random_: random.Random) -> bytes:
    """A file with some bytes changed, moved or lost, half of them in its structure."""
    found = bytearray(data)
    structure = data.index(b"mdat")
    for _ in range(random_.choice([1, 1, 2, 5])):
        place = random_.randrange(random_.choice([structure, len(data)]))
        length = random_.randrange(1, 20)
        match random_.randrange(4):
            case 0:
                found[place : place + 1] = bytes([random_.randrange(256)])
            case 1:
                found[place : place + 4] = random_.choice([0, 1, 0xFFFF, 0xFFFFFFFF]).to_bytes(4, "big")
            case 2:
                found[place:place] = found[place : place + length]
            case _:
                del found[place : place + length]
    return bytes(found)


def test_damaged_files_give_a_picture_or_a_typed_error_and_keep_the_process(worker: DecodeWorker) -> None:
    files = [
        a_grid(item(1), item(2)),
        image_files.encoded(picture(1, "RGBA"), "AVIF"),
        (FOLDER / "ramp_10_bits.avif").read_bytes(),
    ]
    random_ = random.Random(7)
    check(worker, heif_files.heif([item()]), picture())
    pid = worker.pid
    num_refused = 0
    for number in range(600):
        try:
            decoded(worker, mutated(files[number % len(files)], random_))
        except InvalidInputError:
            num_refused += 1
    assert worker.pid == pid
    assert 100 < num_refused < 600
