"""Forward passes take what waits, inside their limits, and one bad image fails alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from encoder_svc.batcher import BatchLimits, EncodedRows, ForwardBatcher
from encoder_svc.families import PixelInputs
from encoder_svc.metrics import EncoderMetrics
from lookonce.errors import OverloadedError, UnavailableError

POISON = 666.0
TIMEOUT_S = 30


class StepwiseModel:
    """A forward pass that waits for permission and doubles its pixels; the value POISON fails the pass."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.started = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)

    def forward(self, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        values = [float(inputs.pixel_values[0, 0]) for inputs in batch]
        self.batches.append(values)
        self.started.release()
        assert self.permits.acquire(timeout=TIMEOUT_S)
        if POISON in values:
            raise ValueError("poison")
        return [inputs.pixel_values * 2 for inputs in batch]


@pytest.fixture
def model() -> StepwiseModel:
    """The model under the batcher."""
    return StepwiseModel()


@pytest.fixture
def make_batcher(model: StepwiseModel) -> Iterator[Callable[..., ForwardBatcher]]:
    """Batchers that are closed after the test."""
    batchers: list[ForwardBatcher] = []

    def make(**limits: Any) -> ForwardBatcher:
        chosen = BatchLimits(**{"max_images": 4, "max_bytes": 1 << 20, "max_queued": 100, **limits})
        batchers.append(ForwardBatcher(model.forward, chosen, EncoderMetrics(CollectorRegistry())))
        return batchers[-1]

    yield make
    model.permits.release(1000)
    for batcher in batchers:
        batcher.close()


def image(value: float, num_pixels: int = 1) -> PixelInputs:
    """An image whose pixels all have one value."""
    return PixelInputs(torch.full((1, num_pixels), float(value)))


def submit_behind_first(model: StepwiseModel, batcher: ForwardBatcher, images: list[PixelInputs]) -> list[Any]:
    """Submits the first image, waits until its pass runs, then submits the others."""
    futures = [batcher.submit(images[0])]
    assert model.started.acquire(timeout=TIMEOUT_S)
    return futures + [batcher.submit(item) for item in images[1:]]


def values(futures: list[Future[EncodedRows]]) -> list[float]:
    """What each image became."""
    return [float(future.result(TIMEOUT_S).rows[0, 0]) for future in futures]


def test_images_that_wait_share_a_pass_up_to_the_limit(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    futures = submit_behind_first(model, make_batcher(), [image(value) for value in range(1, 8)])
    model.permits.release(10)
    assert values(futures) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    assert model.batches == [[1], [2, 3, 4, 5], [6, 7]]


def test_a_pass_is_bounded_by_bytes_but_takes_one_image_of_any_size(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    images = [image(1), image(2, 10), image(3, 10), image(4, 1000), image(5)]
    futures = submit_behind_first(model, make_batcher(max_bytes=80), images)
    model.permits.release(10)
    assert values(futures) == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert model.batches == [[1], [2, 3], [4], [5]]


def test_a_failing_image_fails_alone(model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]) -> None:
    futures = submit_behind_first(model, make_batcher(), [image(1), image(2), image(POISON), image(3)])
    model.permits.release(10)
    with pytest.raises(ValueError, match="poison"):
        futures[2].result(TIMEOUT_S)
    assert values([futures[0], futures[1], futures[3]]) == [2.0, 4.0, 6.0]
    assert values([make_batcher().submit(image(7))]) == [14.0]


def test_a_full_queue_refuses_and_a_free_one_accepts_again(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    batcher = make_batcher(max_queued=2)
    futures = submit_behind_first(model, batcher, [image(1), image(2), image(3)])
    with pytest.raises(OverloadedError, match="2 images wait"):
        batcher.submit(image(4))
    model.permits.release(10)
    assert values(futures) == [2.0, 4.0, 6.0]
    assert values([batcher.submit(image(5))]) == [10.0]


def test_a_cancelled_image_never_reaches_the_model(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    futures = submit_behind_first(model, make_batcher(), [image(1), image(2), image(3)])
    assert futures[1].cancel()
    model.permits.release(10)
    assert values([futures[0], futures[2]]) == [2.0, 6.0]
    assert model.batches == [[1], [3]]


def test_closing_answers_every_image(model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]) -> None:
    batcher = make_batcher()
    futures = submit_behind_first(model, batcher, [image(1), image(2), image(3)])
    model.permits.release(10)
    batcher.close()
    assert values(futures[:1]) == [2.0]
    for future in futures[1:]:
        assert isinstance(future.exception(TIMEOUT_S), (UnavailableError, type(None)))
    with pytest.raises(UnavailableError):
        batcher.submit(image(4))
