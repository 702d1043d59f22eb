"""Forward passes take the waiting images inside their limits, begin at once, and one bad image fails alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision import batcher as batcher_module
from encoder_svc.vision.batcher import BatchLimits, ForwardBatcher
from encoder_svc.vision.forward_queue import EncodedRows
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImagePoisonousError, OverloadedError, UnavailableError
from lookonce.turns.fair_queue import CallerId
from tests import image_files

POISON = 666.0
TIMEOUT_S = 30
A, B = CallerId("tenant", "a"), CallerId("tenant", "b")


class StepwiseModel:
    """A forward pass that waits for permission and doubles its pixels; the value POISON fails the pass."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.started = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.num_controls = 0
        self.control_error: Exception | None = None
        self.poison_error: BaseException = ValueError("poison")

    def forward(self, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        values = [float(inputs.pixel_values[0, 0]) for inputs in batch]
        self.batches.append(values)
        self.started.release()
        assert self.permits.acquire(timeout=TIMEOUT_S)
        if POISON in values:
            raise self.poison_error
        return [inputs.pixel_values * 2 for inputs in batch]

    def control(self) -> None:
        self.num_controls += 1
        if self.control_error is not None:
            raise self.control_error


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def model() -> StepwiseModel:
    """The model that the batchers run."""
    return StepwiseModel()


@pytest.fixture
def registry() -> CollectorRegistry:
    """The registry of the batchers' metrics."""
    return CollectorRegistry()


@pytest.fixture
def make_batcher(model: StepwiseModel, registry: CollectorRegistry) -> Iterator[Callable[..., ForwardBatcher]]:
    """Batchers that are closed after the test."""
    batchers: list[ForwardBatcher] = []
    metrics = EncoderMetrics(registry)

    def make(*, clock: Clock | None = None, **limits: Any) -> ForwardBatcher:
        chosen = BatchLimits(**{"max_images": 4, "max_bytes": 1 << 20, "max_queued": 100, **limits})
        options = {} if clock is None else {"clock": clock}
        batchers.append(ForwardBatcher(model.forward, model.control, chosen, metrics, **options))
        return batchers[-1]

    yield make
    model.permits.release(1000)
    for batcher in batchers:
        batcher.close()


def image(value: float, num_pixels: int = 1) -> PixelInputs:
    """An image whose pixels all have one value."""
    return PixelInputs({"pixel_values": torch.full((1, num_pixels), float(value))}, 1)


def submit_behind_first(
    model: StepwiseModel, batcher: ForwardBatcher, images: list[PixelInputs]
) -> list[Future[EncodedRows]]:
    """Submits the first image, waits until its pass runs, then submits the others."""
    futures = [batcher.submit(images[0], A)]
    assert model.started.acquire(timeout=TIMEOUT_S)
    return futures + [batcher.submit(item, A) for item in images[1:]]


def values(futures: list[Future[EncodedRows]]) -> list[float]:
    """The value that each image's rows have."""
    return [float(future.result(TIMEOUT_S).rows[0, 0]) for future in futures]


def test_images_that_wait_share_a_pass_up_to_the_limit(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher], registry: CollectorRegistry
) -> None:
    futures = submit_behind_first(model, make_batcher(), [image(value) for value in range(1, 8)])
    model.permits.release(10)
    assert values(futures) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    assert model.batches == [[1], [2, 3, 4, 5], [6, 7]]
    assert registry.get_sample_value("lookonce_encoder_batch_wait_seconds_count") == 7
    assert registry.get_sample_value("lookonce_encoder_forward_images_sum") == 7


def test_a_pass_is_bounded_by_bytes_but_takes_one_image_of_any_size(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    images = [image(1), image(2, 10), image(3, 10), image(4, 1000), image(5)]
    futures = submit_behind_first(model, make_batcher(max_bytes=80), images)
    model.permits.release(10)
    assert values(futures) == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert model.batches == [[1], [2, 3], [4], [5]]


def test_a_call_with_many_images_leaves_places_to_others(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    batcher = make_batcher()
    futures = submit_behind_first(model, batcher, [image(value) for value in range(1, 8)])
    futures.append(batcher.submit(image(50), B))
    model.permits.release(10)
    assert values(futures)[-1] == 100.0
    assert model.batches == [[1], [50, 2, 3, 4], [5, 6, 7]], "the caller of the first pass does not lead the second"


def test_a_failing_image_fails_alone(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher], registry: CollectorRegistry
) -> None:
    batcher = make_batcher()
    futures = submit_behind_first(model, batcher, [image(1), image(2), image(POISON), image(3)])
    model.permits.release(10)
    with pytest.raises(ImagePoisonousError) as caught:
        futures[2].result(TIMEOUT_S)
    assert caught.value.__cause__ is model.poison_error
    assert "poison" not in caught.value.message
    assert values([futures[0], futures[1], futures[3]]) == [2.0, 4.0, 6.0]
    assert model.batches == [[1], [2, POISON, 3], [2], [POISON], [3]]
    assert model.num_controls == 1
    assert values([batcher.submit(image(7), A)]) == [14.0]
    assert registry.get_sample_value("lookonce_encoder_model_faults_total") == 0


def test_an_image_that_was_alone_anyway_is_not_run_twice(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    model.permits.release(10)
    assert isinstance(make_batcher().submit(image(POISON), A).exception(TIMEOUT_S), ImagePoisonousError)
    assert model.batches == [[POISON]]


def test_no_image_is_at_fault_if_a_good_picture_fails_as_well(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher], registry: CollectorRegistry
) -> None:
    batcher = make_batcher()
    model.control_error = RuntimeError("broken")
    futures = submit_behind_first(model, batcher, [image(1), image(POISON), image(POISON)])
    model.permits.release(10)
    for future in futures[1:]:
        assert future.exception(TIMEOUT_S) is model.poison_error
    assert model.num_controls == 1, "one control judges all images of a pass"
    assert registry.get_sample_value("lookonce_encoder_model_faults_total") == 1
    assert batcher.is_healthy
    assert values([batcher.submit(image(7), A)]) == [14.0]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."),
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_lack_of_memory_is_no_image_s_fault(
    error: Exception,
    model: StepwiseModel,
    make_batcher: Callable[..., ForwardBatcher],
    registry: CollectorRegistry,
) -> None:
    model.poison_error = error
    model.permits.release(10)
    future = make_batcher().submit(image(POISON), A)
    raised = future.exception(TIMEOUT_S)
    assert isinstance(raised, MemoryError)
    assert raised.__cause__ is error
    assert model.num_controls == 0
    assert registry.get_sample_value("lookonce_encoder_model_faults_total") == 1


def test_of_images_that_need_too_much_memory_together_each_is_tried_alone(
    make_batcher: Callable[..., ForwardBatcher], model: StepwiseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.forward

    def forward_in_little_memory(batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        rows = forward(batch)
        if len(batch) > 1 or float(batch[0].pixel_values[0, 0]) > 50:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return rows

    monkeypatch.setattr(model, "forward", forward_in_little_memory)
    futures = submit_behind_first(model, make_batcher(), [image(1), image(2), image(90), image(3)])
    model.permits.release(10)
    assert isinstance(futures[2].exception(TIMEOUT_S), MemoryError)
    assert values([futures[0], futures[1], futures[3]]) == [2.0, 4.0, 6.0]


def test_failed_controls_in_a_row_make_it_unhealthy_until_a_pass_succeeds(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    batcher = make_batcher()
    model.control_error = RuntimeError("broken")
    model.permits.release(100)

    def fail(times: int) -> None:
        for _ in range(times):
            assert batcher.submit(image(POISON), A).exception(TIMEOUT_S) is model.poison_error

    for _ in range(2):
        fail(2)
        assert values([batcher.submit(image(1), A)]) == [2.0]
        assert batcher.is_healthy
    fail(3)
    assert not batcher.is_healthy
    assert values([batcher.submit(image(1), A)]) == [2.0], "who asks all the same is served"
    assert batcher.is_healthy


def test_too_few_outputs_do_not_end_the_thread() -> None:
    metrics = EncoderMetrics(CollectorRegistry())

    def forward(batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        return [inputs.pixel_values for inputs in batch if inputs.pixel_values[0, 0] > 0]

    batcher = ForwardBatcher(forward, lambda: None, BatchLimits(4, 1 << 20, 100), metrics)
    assert isinstance(batcher.submit(image(-1), A).exception(TIMEOUT_S), ImagePoisonousError)
    assert values([batcher.submit(image(1), A)]) == [1.0]
    batcher.close()


def test_a_full_queue_refuses_and_a_free_one_accepts_again(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    batcher = make_batcher(max_queued=2)
    futures = submit_behind_first(model, batcher, [image(1), image(2), image(3)])
    with pytest.raises(OverloadedError, match="2 images wait"):
        batcher.submit(image(4), A)
    model.permits.release(10)
    assert values(futures) == [2.0, 4.0, 6.0]
    assert values([batcher.submit(image(5), A)]) == [10.0]


def test_a_cancelled_image_never_reaches_the_model(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    futures = submit_behind_first(model, make_batcher(), [image(1), image(2), image(3)])
    assert futures[1].cancel()
    model.permits.release(10)
    assert values([futures[0], futures[2]]) == [2.0, 6.0]
    assert model.batches == [[1], [3]]


def test_a_cancelled_image_leaves_its_place_to_another_one_at_once(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    batcher = make_batcher(max_queued=2)
    futures = submit_behind_first(model, batcher, [image(1), image(2), image(3)])
    assert futures[1].cancel()
    futures[1] = batcher.submit(image(4), A)
    with pytest.raises(OverloadedError):
        batcher.submit(image(5), A)
    model.permits.release(10)
    assert values(futures) == [2.0, 8.0, 6.0]
    assert model.batches == [[1], [3, 4]]


def test_an_idle_model_waits_for_no_second_image(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    batcher = make_batcher()
    future = batcher.submit(image(1), A)
    model.permits.release(10)
    assert values([future]) == [2.0]


def test_a_pass_that_takes_too_long_shows_and_refuses_further_images(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher], registry: CollectorRegistry
) -> None:
    clock = Clock()
    batcher = make_batcher(clock=clock, max_pass_s=60.0)
    assert (batcher.is_healthy, batcher.running_s) == (True, 0.0)
    futures = submit_behind_first(model, batcher, [image(1), image(2)])
    clock.now_s += 61
    assert (batcher.is_healthy, batcher.running_s) == (False, 61.0)
    assert registry.get_sample_value("lookonce_encoder_forward_running_seconds") == 61
    with pytest.raises(UnavailableError, match="does not answer"):
        batcher.submit(image(3), A)
    model.permits.release(10)
    assert values(futures) == [2.0, 4.0]
    assert values([batcher.submit(image(3), A)]) == [6.0]
    assert batcher.is_healthy


def test_a_thread_that_dies_answers_every_image_and_takes_no_more(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]
) -> None:
    model.poison_error = SystemExit("as from a library in C")
    batcher = make_batcher(max_images=1)
    futures = submit_behind_first(model, batcher, [image(POISON), image(2), image(3), image(4)])
    assert futures[2].cancel()
    model.permits.release(10)
    for future in (futures[0], futures[1], futures[3]):
        assert isinstance(future.exception(TIMEOUT_S), UnavailableError)
    assert batcher.has_died
    assert not batcher.is_healthy
    with pytest.raises(UnavailableError):
        batcher.submit(image(5), A)


def test_a_batcher_that_was_closed_has_not_died(make_batcher: Callable[..., ForwardBatcher]) -> None:
    batcher = make_batcher()
    batcher.close()
    assert not batcher.has_died


def test_closing_answers_every_image(model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher]) -> None:
    batcher = make_batcher()
    futures = submit_behind_first(model, batcher, [image(1), image(2), image(3)])
    model.permits.release(10)
    batcher.close()
    assert values(futures[:1]) == [2.0]
    for future in futures[1:]:
        assert isinstance(future.exception(TIMEOUT_S), (UnavailableError, type(None)))
    with pytest.raises(UnavailableError):
        batcher.submit(image(4), A)


def test_closing_does_not_wait_for_a_pass_that_hangs(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher_module, "_CLOSE_TIMEOUT_S", 0.01)
    batcher = make_batcher()
    futures = submit_behind_first(model, batcher, [image(1), image(2)])
    batcher.close()
    assert not futures[0].done()
    assert isinstance(futures[1].exception(TIMEOUT_S), UnavailableError)


def test_closing_waits_no_longer_for_a_pass_that_has_taken_long_before(
    model: StepwiseModel, make_batcher: Callable[..., ForwardBatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher_module, "_CLOSE_TIMEOUT_S", 3600.0)
    clock = Clock()
    batcher = make_batcher(clock=clock)
    futures = submit_behind_first(model, batcher, [image(1), image(2)])
    clock.now_s += 3600
    batcher.close()
    assert not futures[0].done()
    assert isinstance(futures[1].exception(TIMEOUT_S), UnavailableError)


@given(
    images=st.lists(
        st.tuples(st.integers(16, 200), st.integers(16, 200), st.sampled_from("abc")), min_size=1, max_size=7
    )
)
@settings(max_examples=15, derandomize=True)
def test_rows_do_not_depend_on_the_other_images_of_a_pass(
    images: list[tuple[int, int, str]], vision_model: Callable[[str], VisionModel]
) -> None:
    model = vision_model("qwen2_vl")
    pixels = [
        model.adapter.pixel_inputs(image_files.noise(seed, width, height), ProcessorOptions())
        for seed, (width, height, _) in enumerate(images)
    ]
    sizes: list[int] = []
    has_begun, all_are_queued = threading.Event(), threading.Event()

    def forward(batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        has_begun.set()
        assert all_are_queued.wait(TIMEOUT_S)
        sizes.append(len(batch))
        return model.forward(batch)

    limits = BatchLimits(4, 1 << 26, 100)
    batcher = ForwardBatcher(forward, model.warm_up, limits, EncoderMetrics(CollectorRegistry()))
    batcher.submit(pixels[0], CallerId("tenant", "first"))
    assert has_begun.wait(TIMEOUT_S)
    futures = [
        batcher.submit(inputs, CallerId("tenant", name)) for inputs, (_, _, name) in zip(pixels, images, strict=True)
    ]
    all_are_queued.set()
    for inputs, future in zip(pixels, futures, strict=True):
        torch.testing.assert_close(future.result(TIMEOUT_S).rows, model.forward([inputs])[0], rtol=1e-5, atol=1e-5)
    assert sizes == [1] + [4] * (len(images) // 4) + ([len(images) % 4] if len(images) % 4 else [])
    batcher.close()
