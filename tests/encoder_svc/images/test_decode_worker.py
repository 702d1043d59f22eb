"""Decoding in a separate process gives the same pixels, and a crash there costs that image only."""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import PIL.Image
import psutil
import pytest
from prometheus_client import CollectorRegistry

from encoder_svc.images import decode_worker
from encoder_svc.images.decode_worker import DecodeWorker
from encoder_svc.images.image_decoder import decode_image
from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.images.preprocess import Preprocessor
from encoder_svc.images.quarantine import Quarantine, Stage
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions, image_digest
from lookonce.errors import (
    ImageDecodeLimitError,
    ImagePoisonousError,
    ImageTooLargeError,
    ImageUndecodableError,
    InternalError,
    LookonceError,
    UnavailableError,
)
from lookonce.media.image_header import ImageHeader, ImageLimits
from lookonce.process import exact_receive, limited_process
from lookonce.process.process_clock import TimeLimits
from tests import image_files

LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=50_000_000, max_aspect=200.0)
GOOD = image_files.encoded(image_files.noise(1, 90, 40))
# Decoding takes half a second or more.
SLOW = image_files.encoded(image_files.noise(2, 4000, 3000), "JPEG", progressive=True)


@pytest.fixture
def worker() -> Iterator[DecodeWorker]:
    worker = DecodeWorker(LIMITS, TimeLimits(60.0, 120.0))
    yield worker
    worker.close()


def check(worker: DecodeWorker, data: bytes) -> None:
    image, header = worker.decode(data)
    expected, expected_header = decode_image(data, LIMITS)
    assert np.array_equal(np.asarray(image), np.asarray(expected))
    assert header == expected_header


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "AVIF"])
def test_the_pixels_are_those_of_the_decoder(worker: DecodeWorker, file_format: str) -> None:
    check(worker, image_files.encoded(image_files.noise(3, 300, 200), file_format))
    check(worker, image_files.encoded(image_files.noise(4, 1, 1), file_format))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_turned_pictures_arrive_upright(worker: DecodeWorker, orientation: int) -> None:
    check(worker, image_files.oriented_jpeg(image_files.noise(1, 90, 40), orientation))


def test_one_process_serves_many_images(worker: DecodeWorker) -> None:
    check(worker, GOOD)
    pid = worker.pid
    for seed in range(20):
        check(worker, image_files.encoded(image_files.noise(seed, 50, 60)))
    assert worker.pid == pid


def test_bad_images_are_errors_of_their_own_and_keep_the_process(worker: DecodeWorker) -> None:
    check(worker, GOOD)
    pid = worker.pid
    with pytest.raises(ImageUndecodableError, match="broken or truncated"):
        worker.decode(GOOD[: len(GOOD) // 2])
    with pytest.raises(ImageUndecodableError):
        worker.decode(b"no image")
    with pytest.raises(ImageTooLargeError, match="the limit is 50000000"):
        worker.decode(image_files.png_of_size(40_000, 40_000))
    with pytest.raises(ImageDecodeLimitError):
        worker.decode(image_files.jpeg_of_many_scans(4000, 4000, 60))
    check(worker, GOOD)
    assert worker.pid == pid


def test_an_image_that_takes_too_long_is_given_up_and_its_process_killed() -> None:
    worker = DecodeWorker(LIMITS, TimeLimits(60.0, 120.0))
    check(worker, GOOD)
    pid = worker.pid
    assert pid is not None
    worker._time_limits = TimeLimits(0.05, 60.0)
    with pytest.raises(ImageDecodeLimitError, match=r"0\.05 s"):
        worker.decode(SLOW)
    assert not psutil.pid_exists(pid)
    worker._time_limits = TimeLimits(60.0, 120.0)
    check(worker, GOOD)
    worker.close()


def test_a_process_that_waits_for_a_processor_does_not_use_up_the_image_s_time(worker: DecodeWorker) -> None:
    check(worker, GOOD)
    assert worker.pid is not None
    process = psutil.Process(worker.pid)
    worker._time_limits = TimeLimits(0.2, 60.0)
    process.suspend()
    # A suspended process gets no processor time, like one on a machine that is far too busy.
    resuming = threading.Timer(0.5, process.resume)
    resuming.start()
    check(worker, GOOD)
    resuming.join()
    assert worker.pid == process.pid


async def test_an_image_whose_process_gets_no_processor_time_is_not_to_blame(
    vision_model: Callable[[str], VisionModel],
) -> None:
    registry = CollectorRegistry()
    quarantine = Quarantine(Stage.DECODE, EncoderMetrics(registry))
    adapter = vision_model("llava_clip").adapter
    preprocessor = Preprocessor(adapter, LIMITS, 1, TimeLimits(60.0, 120.0), quarantine)
    header = preprocessor.read_header(GOOD, ProcessorOptions())

    async def prepared() -> PixelInputs:
        return await preprocessor.prepare(GOOD, header, image_digest(GOOD), ProcessorOptions())

    for _ in range(3):
        await prepared()
        (worker,) = preprocessor._decoders
        pid, worker._time_limits = worker.pid, TimeLimits(0.2, 0.3)
        assert pid is not None
        psutil.Process(pid).suspend()
        with pytest.raises(UnavailableError, match=r"0\.3 s .* try again") as caught:
            await prepared()
        assert caught.value.retry_after_s == 1.0
        assert not psutil.pid_exists(pid)
        worker._time_limits = TimeLimits(60.0, 120.0)
    await prepared()
    assert registry.get_sample_value("lookonce_encoder_poisonous_total", {"stage": "decode"}) in (None, 0)
    preprocessor.close()


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGSEGV, ImagePoisonousError),
        (signal.SIGABRT, ImagePoisonousError),
        # Killed by the kernel for lack of memory, or by an operator: the image is not to blame.
        (signal.SIGKILL, UnavailableError),
        (signal.SIGTERM, UnavailableError),
    ],
)
def test_the_cause_of_the_processs_end_decides_the_status_and_the_next_image_is_right(
    worker: DecodeWorker, number: signal.Signals, error: type[LookonceError]
) -> None:
    check(worker, GOOD)
    pid = worker.pid
    assert pid is not None
    busy_s = sum(psutil.Process(pid).cpu_times()[:2])

    def kill_while_it_decodes() -> None:
        while sum(psutil.Process(pid).cpu_times()[:2]) < busy_s + 0.05:
            time.sleep(0.005)
        os.kill(pid, number)

    killer = threading.Thread(target=kill_while_it_decodes)
    killer.start()
    with pytest.raises(error):
        worker.decode(SLOW)
    killer.join()
    check(worker, GOOD)


def test_a_process_killed_while_idle_does_not_count_against_an_image(worker: DecodeWorker) -> None:
    check(worker, GOOD)
    assert worker.pid is not None
    process = psutil.Process(worker.pid)
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.005)
    check(worker, GOOD)


def test_an_image_that_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_worker, "memory_limit", lambda limits: 256 << 20)
    worker = DecodeWorker(LIMITS, TimeLimits(60.0, 120.0))
    check(worker, GOOD)
    with pytest.raises(ImageDecodeLimitError, match="memory"):
        worker.decode(image_files.encoded(PIL.Image.new("RGBA", (7000, 7000))))
    check(worker, GOOD)
    worker.close()


def test_a_process_that_cannot_start_is_not_the_image_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookonce.process.limited_process.sys.executable", "/bin/false")
    with pytest.raises(InternalError):
        DecodeWorker(LIMITS, TimeLimits(60.0, 120.0)).decode(GOOD)


def test_an_answer_that_was_not_read_to_its_end_is_never_taken_for_the_next_one(
    worker: DecodeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive_without_memory(connection: socket.socket, num_bytes: int, *others: Any) -> bytearray:
        if num_bytes == 3 * 90 * 40:
            raise MemoryError
        return exact_receive.receive(connection, num_bytes, *others)

    with monkeypatch.context() as poor:
        poor.setattr(decode_worker, "receive", receive_without_memory)
        with pytest.raises(MemoryError):
            worker.decode(GOOD)
    check(worker, image_files.encoded(image_files.noise(3, 50, 60)))


def test_a_process_that_the_system_cannot_start_leaves_nothing_open(
    worker: DecodeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    num_open = psutil.Process().num_fds()
    monkeypatch.setattr("lookonce.process.limited_process.subprocess.Popen", refuse)
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(InternalError, match="did not start"):
                worker.decode(GOOD)
        assert psutil.Process().num_fds() == num_open
    finally:
        gc.enable()
    monkeypatch.undo()
    check(worker, GOOD)


def test_a_process_that_takes_too_long_to_start_is_tried_again(
    worker: DecodeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_process, "_START_TIMEOUT_S", 0.0)
    with pytest.raises(UnavailableError, match="did not start in time"):
        worker.decode(GOOD)
    monkeypatch.undo()
    check(worker, GOOD)


def test_the_process_has_no_secrets_and_no_model(worker: DecodeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_REDIS_URL", "redis://:secret@somewhere")
    check(worker, GOOD)
    folder = pathlib.Path(f"/proc/{worker.pid}")
    if not folder.exists():
        pytest.skip("/proc is Linux's")
    assert b"secret" not in (folder / "environ").read_bytes()
    maps = (folder / "maps").read_text()
    assert "torch" not in maps
    assert "grpc" not in maps


async def test_an_image_that_killed_two_processes_is_not_tried_again(
    vision_model: Callable[[str], VisionModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bytes] = []

    def decode(self: DecodeWorker, data: bytes) -> tuple[PIL.Image.Image, ImageHeader]:
        tries.append(data)
        if data == GOOD:
            raise ImagePoisonousError("died")
        return decode_image(data, LIMITS)

    monkeypatch.setattr(DecodeWorker, "decode", decode)
    registry = CollectorRegistry()
    quarantine = Quarantine(Stage.DECODE, EncoderMetrics(registry))
    preprocessor = Preprocessor(vision_model("llava_clip").adapter, LIMITS, 2, TimeLimits(60.0, 120.0), quarantine)
    other = image_files.encoded(image_files.noise(9, 90, 40))
    header = preprocessor.read_header(GOOD, ProcessorOptions())
    for _ in range(4):
        with pytest.raises(ImagePoisonousError):
            await preprocessor.prepare(GOOD, header, image_digest(GOOD), ProcessorOptions())
        await preprocessor.prepare(other, header, image_digest(other), ProcessorOptions())
    assert tries.count(GOOD) == 2
    assert tries.count(other) == 4
    assert registry.get_sample_value("lookonce_encoder_poisonous_total", {"stage": "decode"}) == 2
    assert registry.get_sample_value("lookonce_encoder_quarantine_refused_total", {"stage": "decode"}) == 2
    preprocessor.close()
