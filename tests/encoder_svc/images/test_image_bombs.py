"""Hostile image files, sent to a running encoder: each is refused for its own reason and harms nobody else.

The encoder is a process of its own, so that its memory can be watched: what a bomb unpacks to, it unpacks to in a
decoding process, or nowhere.
"""

from __future__ import annotations

import asyncio
import functools
import pathlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import grpc.aio
import psutil
import pytest
import torch

from encoder_svc.images.decode_worker import memory_limit
from lookonce.common.v1 import common_pb2
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from lookonce.errors import ImageDecodeLimitError, ImageTooLargeError, ImageUndecodableError, LookonceError
from lookonce.local.child_process import ChildProcess
from lookonce.media.image_header import ImageLimits
from lookonce.status_codes import from_rpc_error
from tests import fingerprint_model, heif_files, image_bombs, image_files
from tests.fingerprint_model import NUM_ROWS, Board, Reference
from tests.warm_processes import WarmProcesses

if TYPE_CHECKING:
    from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderServiceAsyncStub

MAX_GROWTH = 50 << 20
NUM_WORKERS = 2
# The encoder's defaults.
LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=50_000_000, max_aspect=200.0)
TIMEOUT_S = 60.0


@functools.cache
def large_png() -> bytes:
    """49 megapixels of 16 bits with transparency: 392 MB of rows in 370 kB."""
    return image_bombs.png_of_rows(7000, 7000, 6, bytes(1 + 7000 * 8), bit_depth=16)


Bomb = tuple[Callable[[], bytes], type[LookonceError]]
BOMBS: dict[str, Bomb] = {
    "180 megapixels in 520 kB": (image_bombs.png_of_180_megapixels, ImageTooLargeError),
    "a claim of 268 megapixels": (lambda: image_files.webp_of_size(16_383, 16_383), ImageTooLargeError),
    "a frame beyond the screen": (image_bombs.gif_with_a_frame_beyond_its_screen, ImageTooLargeError),
    "400 scans": (lambda: image_files.jpeg_of_many_scans(4000, 4000, 400), ImageDecodeLimitError),
    "pixels in 900000 pieces": (lambda: image_bombs.png_of_many_pieces(900_000), ImageDecodeLimitError),
    "the beginning of a large PNG": (lambda: image_bombs.truncated(large_png()), ImageUndecodableError),
    "the beginning of a large JPEG": (
        lambda: image_bombs.truncated(fingerprint_model.large_jpeg(board(1))),
        ImageUndecodableError,
    ),
    "a text of 1 GB": (lambda: image_bombs.png_with_text(1, 1 << 30), ImageUndecodableError),
    "texts of 63 MB": (lambda: image_bombs.png_with_text(63, 1_000_000), ImageUndecodableError),
    "a colour profile of 1 GB": (lambda: image_bombs.png_with_colour_profile(1 << 30), ImageUndecodableError),
    "EXIF that is none": (image_files.jpeg_with_broken_exif, ImageUndecodableError),
    "EXIF of 9 MB": (
        lambda: image_bombs.png_with_exif(image_bombs.exif_of(10) + bytes(9 << 20)),
        ImageDecodeLimitError,
    ),
    "EXIF of a million fractions": (
        lambda: image_bombs.png_with_exif(image_bombs.exif_of_fractions(1_000_000)),
        ImageDecodeLimitError,
    ),
    "the same in a WebP": (
        lambda: image_bombs.webp_with_exif(image_bombs.exif_of_fractions(1_000_000)),
        ImageDecodeLimitError,
    ),
    "the same in a JPEG": (
        lambda: image_bombs.jpeg_with_exif(image_bombs.exif_of_fractions(1_000_000)),
        ImageDecodeLimitError,
    ),
    "PNG blocks": (lambda: image_bombs.png_of_blocks(8 << 20), ImageDecodeLimitError),
    "JPEG blocks": (lambda: image_bombs.jpeg_of_blocks(4 << 20), ImageDecodeLimitError),
    "JPEG fill bytes": (lambda: image_bombs.jpeg_of_fill_bytes(8 << 20), ImageDecodeLimitError),
    "GIF blocks": (lambda: image_bombs.gif_of_blocks(4 << 20), ImageDecodeLimitError),
    "a claim of 268 megapixels in an AVIF": (
        lambda: heif_files.heif([heif_files.avif_item(image_files.noise(), claimed=(16_384, 16_384))]),
        ImageTooLargeError,
    ),
    "an AVIF of more pixels than it claims": (image_bombs.avif_that_claims_few_pixels, ImageUndecodableError),
    "AVIF blocks": (lambda: image_bombs.avif_of_blocks(8 << 20), ImageDecodeLimitError),
    "AVIF items": (lambda: image_bombs.avif_of_items(20_000), ImageDecodeLimitError),
    "WebP blocks": (lambda: image_bombs.webp_of_blocks(8 << 20), ImageDecodeLimitError),
}
# Unusual files that are valid pictures.
HARMLESS: dict[str, Callable[[], bytes]] = {
    "EXIF of 5000 entries": lambda: image_bombs.png_with_exif(image_bombs.exif_of(5000, size=100)),
    "EXIF that points beyond its end": lambda: image_bombs.png_with_exif(
        image_bombs.exif_of(9, size=1 << 20, offset=1 << 30)
    ),
    "EXIF of noise": lambda: image_bombs.png_with_exif(image_bombs.exif_of_noise(3)),
    "an AVIF in tiles": image_bombs.avif_in_tiles,
    "400 scans of little": lambda: image_files.jpeg_of_many_scans(500, 500, 400),
}


@functools.cache
def bomb(name: str) -> bytes:
    return BOMBS[name][0]()


def board(seed: int) -> Board:
    return fingerprint_model.random_board(random.Random(seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return fingerprint_model.build(tmp_path_factory.mktemp("models") / "fingerprint")


@pytest.fixture(scope="module")
def reference(folder: pathlib.Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def process(
    folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, warm_processes: WarmProcesses
) -> Iterator[ChildProcess]:
    """An encoder without Redis, so that all rows come with the answers."""
    # A second of processor time takes many times as long on a busy machine.
    limits = ["--decode-timeout-s", "1", "--decode-wall-timeout-s", str(TIMEOUT_S)]
    arguments = ["--model", str(folder), "--num-threads", "1", *limits]
    arguments += ["--preprocess-workers", str(NUM_WORKERS), "--drain-timeout-s", "1"]
    with warm_processes.for_stacks():
        process = ChildProcess("encoder", "encoder_svc", arguments, tmp_path_factory.mktemp("encoder"))
    try:
        process.wait_until_ready(time.monotonic() + 120)
        asyncio.run(warm_up(process.ready.target))
        yield process
    finally:
        process.stop(10)


async def warm_up(target: str) -> None:
    """Waits until both decoding processes run and buffers have their final size."""
    async with channel_to(target) as channel:
        stub = EncoderServiceStub(channel)
        await asyncio.gather(
            *(encode(stub, fingerprint_model.png(board(seed), 1000, 1000)) for seed in range(100, 116))
        )
        await refusal(stub, bytes(12 << 20))


@pytest.fixture
async def stub(process: ChildProcess) -> AsyncIterator[EncoderServiceAsyncStub]:
    async with channel_to(process.ready.target) as channel:
        yield EncoderServiceStub(channel)


def channel_to(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=[("grpc.max_send_message_length", 64 << 20)])


async def encode(stub: EncoderServiceAsyncStub, data: bytes) -> torch.Tensor:
    """The rows [NUM_ROWS, hidden_size] that the encoder answers with."""
    item = pb.EncodeItem(image=common_pb2.ImageSource(data=data), rows_if_not_stored=True)
    response = await stub.Encode(pb.EncodeRequest(items=[item]), timeout=TIMEOUT_S)
    return torch.frombuffer(bytearray(response.results[0].rows), dtype=torch.float32).view(NUM_ROWS, -1)


async def refusal(stub: EncoderServiceAsyncStub, data: bytes) -> LookonceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await encode(stub, data)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return from_rpc_error(caught.value)


async def check_next(stub: EncoderServiceAsyncStub, reference: Reference, seed: int) -> None:
    found = await encode(stub, fingerprint_model.png(board(seed)))
    assert torch.allclose(found, reference.rows([board(seed)])[0], atol=1e-4)


def memory_bytes(pid: int, name: str) -> int:
    """A figure of /proc/PID/status, by the name of its line."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def forget_peak(pid: int) -> None:
    """Restarts the measurement of the largest resident size."""
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")


def check_children(pid: int) -> None:
    """Asserts that there are not too many decoding processes, and that none exceeds its limit."""
    children = psutil.Process(pid).children()
    assert len(children) <= NUM_WORKERS
    for child in children:
        assert memory_bytes(child.pid, "VmPeak") <= memory_limit(LIMITS)


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_for_its_reason_and_the_next_picture_is_encoded(
    process: ChildProcess, stub: EncoderServiceAsyncStub, reference: Reference, name: str
) -> None:
    data = bomb(name)
    forget_peak(process.pid)
    before = memory_bytes(process.pid, "VmRSS")
    error = await refusal(stub, data)
    assert type(error) is BOMBS[name][1]
    for internal in ("0x", "PIL", "BytesIO", "Traceback", "/"):
        assert internal not in error.message
    assert memory_bytes(process.pid, "VmHWM") - before < MAX_GROWTH
    check_children(process.pid)
    await check_next(stub, reference, list(BOMBS).index(name))


@pytest.mark.parametrize("name", HARMLESS)
async def test_an_odd_file_is_a_picture_like_any_other(
    process: ChildProcess, stub: EncoderServiceAsyncStub, reference: Reference, name: str
) -> None:
    forget_peak(process.pid)
    before = memory_bytes(process.pid, "VmRSS")
    assert (await encode(stub, HARMLESS[name]())).shape[0] == NUM_ROWS
    assert memory_bytes(process.pid, "VmHWM") - before < MAX_GROWTH
    await check_next(stub, reference, 50 + list(HARMLESS).index(name))


async def test_a_picture_near_the_limits_is_decoded_or_refused_for_its_time(
    process: ChildProcess, stub: EncoderServiceAsyncStub, reference: Reference
) -> None:
    """The unpacked pixels stay in the decoding process, whose memory is limited."""
    data = large_png()
    refusals: list[grpc.aio.AioRpcError] = []
    try:
        await encode(stub, data)
    except grpc.aio.AioRpcError as error:
        refusals.append(error)
    assert all(type(from_rpc_error(error)) is ImageDecodeLimitError for error in refusals)
    check_children(process.pid)
    await check_next(stub, reference, 60)


async def test_all_bombs_at_once_spoil_no_picture_beside_them(
    process: ChildProcess, stub: EncoderServiceAsyncStub, reference: Reference
) -> None:
    good = [check_next(stub, reference, seed) for seed in range(70, 86)]
    errors, _ = await asyncio.gather(
        asyncio.gather(*(refusal(stub, bomb(name)) for name in BOMBS)), asyncio.gather(*good)
    )
    assert [type(error) for error in errors] == [expected for _, expected in BOMBS.values()]
    check_children(process.pid)
