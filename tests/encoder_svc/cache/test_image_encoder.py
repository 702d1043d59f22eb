"""An image is refused before it costs anything, and every way out returns its places in queue and budget."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from encoder_svc.cache.encode_job import CachePolicy, EncodeJob
from encoder_svc.cache.image_encoder import ImageEncoder
from encoder_svc.cache.queue_places import QueuePlaces
from encoder_svc.cache.single_flight import SingleFlight
from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.images.pixel_budget import PixelBudget
from encoder_svc.images.preprocess import Preprocessor
from encoder_svc.images.quarantine import Quarantine, Stage
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.batcher import BatchLimits, ForwardBatcher
from encoder_svc.vision.vision_model import VisionModel, row_bytes
from lookonce.content_key import DEFAULT_TENANT, ProcessorOptions, content_key, image_digest
from lookonce.errors import (
    ImagePoisonousError,
    ImageUndecodableError,
    OverloadedError,
    UnavailableError,
)
from lookonce.media.image_header import ImageLimits
from lookonce.process.process_clock import TimeLimits
from lookonce.turns.caller_order import CallerOrder
from lookonce.turns.fair_queue import CallerId
from tests import image_files
from tests.clock import Clock

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000, max_aspect=50.0)
MAX_PASS_S = 60.0
TIMEOUT_S = 30


@dataclass(slots=True)
class Bench:
    """An encoder of two images at a time on a real model, with a gate in front of its forward pass."""

    encoder: ImageEncoder
    model: VisionModel
    budget: PixelBudget
    registry: CollectorRegistry
    clock: Clock
    gate: threading.Event
    # Set once a pass has come to the gate.
    is_busy: threading.Event
    # Raised by forward passes, but not by the control.
    error: Exception | None = None

    async def encode(self, data: bytes) -> Any:
        """Encodes a file as the only image of its caller."""
        options = ProcessorOptions()
        key = content_key(image_digest(data), self.model.fingerprint, options, DEFAULT_TENANT)
        order: CallerOrder[CallerId] = CallerOrder()
        with order.entered(CallerId("tenant", "me")) as turn:
            job = EncodeJob(key, data, (), options, CachePolicy.READ_AND_WRITE, None, turn)
            async with asyncio.timeout(TIMEOUT_S):
                return await SingleFlight[Any]().start("key", lambda flight: self.encoder.encode(job, flight))

    @property
    def num_queued(self) -> float | None:
        """The gauge of queued images."""
        return self.registry.get_sample_value("lookonce_encoder_queued_images")


@asynccontextmanager
async def opened(model: VisionModel) -> AsyncIterator[Bench]:
    registry, clock = CollectorRegistry(), Clock()
    metrics = EncoderMetrics(registry)
    gate, is_busy = threading.Event(), threading.Event()
    gate.set()

    def forward(batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        is_busy.set()
        assert gate.wait(TIMEOUT_S)
        if one.error is not None:
            raise one.error
        return model.forward(batch)

    budget = PixelBudget(1 << 30, 2)
    batcher = ForwardBatcher(
        forward, model.warm_up, BatchLimits(8, 1 << 26, 100, max_pass_s=MAX_PASS_S), metrics, clock=clock
    )
    encoder = ImageEncoder(
        model,
        Preprocessor(model.adapter, LIMITS, 2, TimeLimits(60.0, 120.0), Quarantine(Stage.DECODE, metrics)),
        batcher,
        metrics,
        places=QueuePlaces(2),
        budget=budget,
        quarantine=Quarantine(Stage.FORWARD, metrics),
    )
    one = Bench(encoder, model, budget, registry, clock, gate, is_busy)
    try:
        yield one
    finally:
        gate.set()
        await asyncio.to_thread(encoder.close)


@pytest.fixture
async def bench(vision_model: Callable[[str], VisionModel]) -> AsyncIterator[Bench]:
    async with opened(vision_model("llava_clip")) as one:
        yield one


def png(seed: int) -> bytes:
    """An image file that differs between seeds."""
    return image_files.encoded(image_files.noise(seed))


async def until_busy(bench: Bench) -> None:
    assert await asyncio.to_thread(bench.is_busy.wait, TIMEOUT_S)


async def test_an_image_becomes_the_model_s_rows_with_their_description(bench: Bench) -> None:
    entry = await bench.encode(png(1))
    inputs = bench.model.adapter.pixel_inputs(image_files.noise(1), ProcessorOptions())
    assert bytes(entry.rows) == bytes(row_bytes(bench.model.forward([inputs])[0]))
    assert (entry.meta.num_rows, entry.meta.image_width, entry.meta.image_height) == (16, 80, 60)
    assert entry.meta.size_bytes == entry.rows.nbytes
    assert (bench.num_queued, bench.budget.num_bytes) == (0, 0)


async def test_images_beyond_the_limit_are_refused_and_the_others_go_on(bench: Bench) -> None:
    bench.gate.clear()
    waiting = [asyncio.create_task(bench.encode(png(seed))) for seed in (1, 2)]
    await until_busy(bench)
    assert bench.num_queued == 2
    with pytest.raises(OverloadedError, match="2 images"):
        await bench.encode(png(3))
    bench.gate.set()
    await asyncio.gather(*waiting)
    assert (bench.num_queued, bench.budget.num_bytes) == (0, 0)


async def test_a_file_that_cannot_be_decoded_returns_its_place(bench: Bench) -> None:
    for _ in range(3):
        with pytest.raises(ImageUndecodableError):
            await bench.encode(png(1)[:-200])
    assert (bench.num_queued, bench.budget.num_bytes) == (0, 0)


async def test_while_a_pass_hangs_images_are_refused_at_once(bench: Bench) -> None:
    bench.gate.clear()
    stuck = asyncio.create_task(bench.encode(png(1)))
    await until_busy(bench)
    bench.clock.now_s += MAX_PASS_S + 1
    assert not bench.encoder.is_healthy
    with pytest.raises(UnavailableError, match="does not answer"):
        await bench.encode(png(2))
    bench.gate.set()
    await stuck
    assert (await bench.encode(png(2))).meta.num_rows == 16


async def test_an_image_on_which_the_model_fails_twice_is_not_tried_a_third_time(bench: Bench) -> None:
    bench.error = RuntimeError("sick")
    with capture_logs():
        for _ in range(2):
            with pytest.raises(ImagePoisonousError, match="fails on this image"):
                await bench.encode(png(1))
    bench.error = None
    with pytest.raises(ImagePoisonousError, match="2 times"):
        await bench.encode(png(1))
    assert (await bench.encode(png(2))).meta.num_rows == 16
    assert (bench.num_queued, bench.budget.num_bytes) == (0, 0)
