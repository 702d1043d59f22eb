"""Pixels of HEIC files against pictures that were known before they were coded, and the bounds of their decoding."""

from __future__ import annotations

import functools
import io
import os
import pathlib
import random
import socket
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import PIL.Image
import pytest

from encoder_svc.images import decode_process, decode_worker
from encoder_svc.images.decode_worker import DecodeWorker
from encoder_svc.images.image_decoder import decode_image
from lookonce.errors import ImageDecodeLimitError, ImageUndecodableError, InvalidInputError, UnsupportedError
from lookonce.process.process_clock import ProcessClock, TimeLimits
from tests import heif_files, image_files
from tests.encoder_svc.images.decoding import LIMITS, decoded

pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")

WIDTH, HEIGHT = 149, 101
LOSSLESS = {"quality": -1, "chroma": 444, "matrix_coefficients": 0}
NUM_THREADS = 2


@functools.cache
def picture(seed: int = 1, mode: str = "RGB") -> PIL.Image.Image:
    colours = image_files.noise(seed, WIDTH, HEIGHT)
    if mode != "RGBA":
        return colours.convert(mode)
    colours.putalpha(PIL.Image.linear_gradient("L").resize(colours.size))
    return colours


def heic(*images: PIL.Image.Image, **options: object) -> bytes:
    """A file of images; the last one is the primary one."""
    file = pillow_heif.HeifFile()
    for image in images:
        file.add_from_pillow(image)
    stream = io.BytesIO()
    file.save(stream, **{"primary_index": len(images) - 1, "save_all": True, **LOSSLESS, **options})
    return stream.getvalue()


def deep(samples: np.ndarray, monkeypatch: pytest.MonkeyPatch, bits: int) -> bytes:
    """A lossless file of samples [height, width, 3] of so many bits."""
    monkeypatch.setattr(pillow_heif.options, "SAVE_HDR_TO_12_BIT", bits == 12)
    wide = (samples << (16 - bits)).astype("<u2").tobytes()
    stream = io.BytesIO()
    pillow_heif.from_bytes("RGB;16", samples.shape[1::-1], wide).save(stream, **LOSSLESS)
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("tile_size", [0, 64])
def test_a_lossless_file_has_the_pixels_that_were_coded(worker: DecodeWorker, mode: str, tile_size: int) -> None:
    """Tiles are the way of phones. The size is no multiple of theirs, so a crop is a part of the file."""
    data = heic(picture(1, mode), tile_size=tile_size)
    assert (b"grid" in data) == bool(tile_size)
    assert np.array_equal(decoded(worker, data), np.asarray(picture(1, mode).convert("RGB")))


@pytest.mark.parametrize("tile_size", [0, 64])
def test_a_lossy_file_has_the_pixels_of_libheif(worker: DecodeWorker, tile_size: int) -> None:
    data = heic(picture(), quality=60, chroma=420, matrix_coefficients=6, tile_size=tile_size)
    whole = pillow_heif.open_heif(data).to_pillow()
    assert np.abs(decoded(worker, data) - np.asarray(whole)).max() <= 1
    assert np.abs(decoded(worker, data) - np.asarray(picture())).mean() < 6


@pytest.mark.parametrize("bits", [10, 12])
def test_samples_of_10_and_12_bits_are_scaled(worker: DecodeWorker, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(1).integers(0, 2**bits, (64, 80, 3))
    samples[0, :2] = [[0] * 3, [2**bits - 1] * 3]
    found = decoded(worker, deep(samples, monkeypatch, bits))
    assert np.abs(found - samples * 255 / (2**bits - 1)).max() <= 1
    assert (found[0, 0].max(), found[0, 1].min()) == (0, 255)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_lie_over_white(worker: DecodeWorker, mode: str) -> None:
    image = picture(1, "RGBA").convert(mode)
    four = np.asarray(image.convert("RGBA")).astype(float)
    share = four[..., 3:] / 255
    expected = np.rint(four[..., :3] * share + 255 * (1 - share))
    assert np.abs(decoded(worker, heic(image)) - expected).max() <= 1


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([heif_files.rotation(1)], lambda pixels: np.rot90(pixels)),
        ([heif_files.rotation(3)], lambda pixels: np.rot90(pixels, 3)),
        ([heif_files.mirror(0)], np.flipud),
        ([heif_files.mirror(1)], np.fliplr),
        ([heif_files.rotation(1), heif_files.mirror(1)], lambda pixels: np.fliplr(np.rot90(pixels))),
        ([heif_files.crop(30, 20), heif_files.rotation(3)], lambda pixels: np.rot90(pixels[22:42, 17:47], 3)),
    ],
)
def test_turns_are_those_that_libheif_makes(
    worker: DecodeWorker, turns: list[bytes], expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    image = image_files.noise(1, 64, 64)
    data = heif_files.heif([heif_files.coded_item(heic(image), b"hvc1", *turns)], brand=b"heic")
    found = decoded(worker, data)
    assert np.array_equal(found, expected(np.asarray(image)))
    assert np.array_equal(found, np.asarray(pillow_heif.open_heif(data).to_pillow()))


def test_a_turn_in_exif_does_not_count(worker: DecodeWorker) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    turned = heif_files.coded_item(heic(image_files.noise(1, 64, 64)), b"hvc1", heif_files.rotation(3))
    data = heif_files.heif([turned, heif_files.exif_item(6)], [(b"cdsc", 2, [1])], brand=b"heic")
    assert np.array_equal(decoded(worker, data), np.rot90(np.asarray(image_files.noise(1, 64, 64)), 3))


def test_only_the_primary_image_counts(worker: DecodeWorker) -> None:
    data = heic(picture(5), image_files.noise(6, 90, 70), picture(7), thumbnails=[64])
    assert np.array_equal(decoded(worker, data), np.asarray(picture(7)))


@pytest.mark.parametrize("tile_size", [0, 64])
def test_a_file_cut_anywhere_is_refused(tile_size: int) -> None:
    """libheif itself would return the tiles of a grid that are left, and green for the others."""
    data = heic(picture(), quality=60, tile_size=tile_size)
    for cut in range(0, len(data), 23):
        with pytest.raises(ImageUndecodableError):
            decode_image(data[:cut], LIMITS)


def test_a_grid_with_a_tile_that_cannot_be_decoded_is_refused() -> None:
    tile = heif_files.coded_item(heic(image_files.noise(1, 64, 64)), b"hvc1")
    broken = heif_files.Item(b"hvc1", bytes(len(tile.content)), tile.properties)
    grid = heif_files.grid_item(2, 1, 128, 64)
    data = heif_files.heif([grid, tile, broken], [(b"dimg", 1, [2, 3])], brand=b"heic")
    # The library alone fills the second tile with one colour.
    alone = np.asarray(pillow_heif.open_heif(data).to_pillow())
    assert (alone[:, 64:] == alone[0, 64]).all()
    with pytest.raises(ImageUndecodableError, match="broken or truncated"):
        decode_image(data, LIMITS)


@pytest.mark.parametrize(("side", "claimed"), [(64, 16), (64, 640), (2048, 64)])
def test_a_picture_that_has_another_size_than_it_claims_is_refused(side: int, claimed: int) -> None:
    """libheif reports the last of them with the words of a lack of memory."""
    large = heic(PIL.Image.new("RGB", (side, side)), quality=10, chroma=420, matrix_coefficients=6)
    item = heif_files.coded_item(large, b"hvc1", claimed=(claimed, claimed))
    with pytest.raises(ImageUndecodableError):
        decode_image(heif_files.heif([item], brand=b"heic"), LIMITS)


def test_an_image_that_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = heic(PIL.Image.new("RGB", (4000, 3000)), quality=30, chroma=420, tile_size=512, matrix_coefficients=6)
    monkeypatch.setattr(decode_worker, "memory_limit", lambda limits: 180 << 20)
    worker = DecodeWorker(LIMITS, TimeLimits(60.0, 120.0))
    with pytest.raises(ImageDecodeLimitError, match="memory"):
        worker.decode(large)
    assert np.array_equal(decoded(worker, heic(picture())), np.asarray(picture()))
    worker.close()


def test_decoding_uses_few_threads() -> None:
    data = heic(PIL.Image.new("RGB", (1500, 1000)), quality=30, chroma=420, tile_size=256, matrix_coefficients=6)
    worker = DecodeWorker(LIMITS, TimeLimits(60.0, 120.0))
    decoded(worker, heic(picture()))
    tasks = pathlib.Path(f"/proc/{worker.pid}/task")
    if not tasks.exists():
        pytest.skip("/proc is Linux's")
    most = 0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.is_set():
            most = max(most, len(os.listdir(tasks)))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    decoded(worker, data)
    is_over.set()
    watcher.join()
    worker.close()
    assert 1 <= most <= NUM_THREADS


def test_an_encoder_without_the_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of the decoding process run here, so that the package can be taken away."""
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    ours, theirs = socket.socketpair()
    side = threading.Thread(target=decode_process.serve, args=(theirs, LIMITS))
    side.start()
    clock = ProcessClock(os.getpid(), TimeLimits(60.0, 120.0))
    try:
        with pytest.raises(UnsupportedError) as caught:
            decode_worker._exchange(ours, heic(picture()), clock)
        assert "HEIC" in caught.value.message
        assert "pip install 'lookonce[heic]'" in caught.value.message
        # AVIF needs Pillow only.
        image, _ = decode_worker._exchange(ours, image_files.encoded(picture(), "AVIF"), clock)
        assert image.size == (WIDTH, HEIGHT)
    finally:
        ours.close()
        side.join()
        theirs.close()


def test_damaged_files_give_a_picture_or_a_typed_error_and_keep_the_process(worker: DecodeWorker) -> None:
    files = [
        heic(picture(), quality=60, tile_size=64),
        heic(picture(1, "RGBA"), quality=60),
        heic(picture(1, "L"), quality=60),
    ]
    random_ = random.Random(3)
    decoded(worker, heic(picture()))
    pid = worker.pid
    num_refused = 0
    for number in range(600):
        data = bytearray(files[number % len(files)])
        structure = bytes(data).index(b"mdat")
        for _ in range(random_.choice([1, 1, 2, 5])):
            place = random_.randrange(random_.choice([structure, len(data)]))
            data[place] ^= 1 << random_.randrange(8)
        try:
            decoded(worker, bytes(data))
        except InvalidInputError:
            num_refused += 1
    assert worker.pid == pid
    assert 50 < num_refused < 600
