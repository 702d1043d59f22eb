"""Runs forward passes over the images of all requests: one thread, one bounded queue, one future per image.

A pass begins as soon as the model is free and an image waits; forward_queue.py chooses the images that share it.
Waiting for more images did not pay (docs/log.md).

When a pass of several images fails, each of them runs again alone, so that only the image at fault fails. An image that
fails alone is followed by a control, a pass over a picture known to be good. When the control succeeds, the image is
poisonous. When it fails, too, the model is at fault, and the image gets its own error unchanged. Lack of memory is
never held against an image: it depends on everything else in memory, and after it the model may fail on every new shape
although the control succeeds.

A model that fails several controls in a row is unhealthy. Images are still accepted, for clients that have no other
encoder. While none comes, the control is repeated from time to time. The first pass that succeeds makes the model
healthy again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.forward_queue import EncodedRows, ForwardJob, ForwardQueue
from lookonce.errors import ImagePoisonousError, OverloadedError, UnavailableError
from lookonce.logs import get_logger
from lookonce.model.lack_of_memory import is_lack_of_memory
from lookonce.turns.fair_queue import CallerId

Forward = Callable[[Sequence[PixelInputs]], list[torch.Tensor]]

# Age up to which the end of the process waits for the pass in progress. An older one is taken to hang.
_CLOSE_TIMEOUT_S = 10.0
# Failed controls in a row, without a successful pass in between, that make the model unhealthy.
_MAX_FAILED_CONTROLS = 3
# Pause between controls of an unhealthy model while no image comes.
_RECOVERY_PAUSE_S = 5.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of the queue and of one forward pass."""

    # Images in one forward pass.
    max_images: int
    # Pixel bytes in one forward pass; one image alone may exceed it.
    max_bytes: int
    # Waiting images.
    max_queued: int
    # Duration of a pass beyond which the batcher is unhealthy, seconds.
    max_pass_s: float = math.inf


class ForwardBatcher:
    """The forward thread and its queue. `submit` may be called from any thread."""

    def __init__(
        self,
        forward: Forward,
        control: Callable[[], object],
        limits: BatchLimits,
        metrics: EncoderMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the thread.

        `control` encodes a known good picture and raises when the model does not work; it runs on the forward thread.
        """
        self._forward = forward
        self._control = control
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._queue = ForwardQueue(limits.max_images, limits.max_bytes)
        self._last_number = -1
        self._changed = threading.Condition()
        self._closed = False
        self._has_died = False
        # The images of the pass in progress.
        self._in_hand: list[ForwardJob] = []
        self._pass_started_s: float | None = None
        # Counted since the last successful pass. Written by the forward thread only.
        self._num_failed_controls = 0
        metrics.forward_running_seconds.set_function(lambda: self.running_s)
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    @property
    def running_s(self) -> float:
        """Age of the forward pass in progress, seconds; 0 when there is none."""
        started_s = self._pass_started_s
        return 0.0 if started_s is None else self._clock() - started_s

    @property
    def is_healthy(self) -> bool:
        """Whether forward passes end, and fewer than three control passes in a row have failed."""
        return self.is_answering and self._num_failed_controls < _MAX_FAILED_CONTROLS

    @property
    def has_died(self) -> bool:
        """Whether the thread has ended by itself, so that only a new process helps."""
        return self._has_died

    @property
    def is_answering(self) -> bool:
        """Whether the thread is alive and its pass is not overdue. A pass that hangs cannot be interrupted."""
        return self._thread.is_alive() and not self._has_died and self.running_s <= self._limits.max_pass_s

    def submit(self, inputs: PixelInputs, caller: CallerId, number: int | None = None) -> Future[EncodedRows]:
        """Queues one image. `number` is its position among all images asked for; None puts it behind all others.

        Raises OverloadedError when the queue is full, UnavailableError after `close` or while the model hangs.

        The future raises ImagePoisonousError when the model fails on this image but works otherwise, and MemoryError
        for any lack of memory. Else it raises the error of the pass with this image alone. Cancelling it before its
        pass removes the image from the queue.
        """
        with self._changed:
            self.check_answering()
            if len(self._queue) >= self._limits.max_queued:
                raise OverloadedError(f"{len(self._queue)} images wait for the model, which is the limit")
            number = self._last_number + 1 if number is None else number
            self._last_number = max(self._last_number, number)
            job = ForwardJob(inputs, caller, number, self._clock())
            self._queue.put(job)
            self._changed.notify()
        # The callback gets caller and number but not the job: the future would keep its own pixels alive.
        job.future.add_done_callback(functools.partial(self._drop_cancelled, job.caller, job.number))
        return job.future

    def check_answering(self) -> None:
        """Raises UnavailableError after `close` or while the model hangs."""
        if self._closed:
            raise UnavailableError("the encoder is shutting down; retry on another replica")
        if not self.is_answering:
            raise UnavailableError("the encoder's model does not answer; retry on another replica")

    def close(self) -> None:
        """Ends the thread after the pass in progress. Waiting images get UnavailableError.

        Waits until the pass is ten seconds old; one that hangs does not keep the process from ending.
        """
        with self._changed:
            self._closed = True
            dropped = self._queue.clear()
            self._changed.notify()
        self._thread.join(max(0.0, _CLOSE_TIMEOUT_S - self.running_s))
        if self._thread.is_alive():
            _log.warning(
                "a forward pass did not end; it is abandoned with the process", running_s=round(self.running_s, 3)
            )
        _refuse(dropped, "the encoder is shutting down; retry on another replica")

    def _drop_cancelled(self, caller: CallerId, number: int, future: Future[EncodedRows]) -> None:
        if future.cancelled():
            with self._changed:
                self._queue.discard(caller, number)

    def _run(self) -> None:
        try:
            while (plan := self._next_pass()) is not None:
                self._in_hand = [job for job in plan if job.future.set_running_or_notify_cancel()]
                if self._in_hand:
                    self._encode(self._in_hand)
                elif not plan:
                    self._is_model_working()
                self._in_hand = []
                # The local variable would keep the pixels in memory until the next image comes.
                plan.clear()
        except BaseException:
            _log.exception("the forward thread ended")
            self._die()

    def _die(self) -> None:
        """Answers all images with UnavailableError and accepts no more."""
        with self._changed:
            self._has_died = True
            dropped = self._queue.clear()
        unanswered = (job for job in self._in_hand if not job.future.done())
        _refuse([*unanswered, *dropped], "the encoder's model stopped; retry on another replica")

    def _next_pass(self) -> list[ForwardJob] | None:
        """Blocks until a pass may begin and returns its images.

        An empty list means that nothing waits and it is time for a control; None means that the batcher is closed.
        """
        with self._changed:
            while not self._closed:
                if plan := self._queue.plan():
                    self._queue.take(plan)
                    return plan
                if not self._changed.wait(self._control_pause_s()):
                    return []
            return None

    def _control_pause_s(self) -> float | None:
        """Time without images after which the control runs again, seconds; None while the model is healthy."""
        return None if self._num_failed_controls < _MAX_FAILED_CONTROLS else _RECOVERY_PAUSE_S

    def _encode(self, jobs: Sequence[ForwardJob]) -> None:
        now_s = self._clock()
        for job in jobs:
            self._metrics.batch_wait_seconds.observe(now_s - job.arrived_s)
        if len(jobs) > 1 and self._attempt(jobs) is None:
            return
        failures = [(job, error) for job in jobs if (error := self._attempt([job])) is not None]
        if failures:
            self._blame(failures)

    def _attempt(self, jobs: Sequence[ForwardJob]) -> Exception | None:
        """Runs one forward pass and answers its images, or returns the error without its traceback."""
        started_s = self._clock()
        try:
            with self._timed():
                outputs = self._forward([job.inputs for job in jobs])
            answers = list(zip(jobs, outputs, strict=True))
        except Exception as error:
            _log.warning("a forward pass failed", num_images=len(jobs), exc_info=error)
            # The log has the traceback. Its frames refer to the jobs, whose futures get the error: a cycle that would
            # keep the images in memory until the next garbage collection.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            return error
        compute_s = self._clock() - started_s
        self._num_failed_controls = 0
        self._metrics.forward_seconds.observe(compute_s)
        self._metrics.forward_images.observe(len(jobs))
        self._metrics.encodes.inc(len(jobs))
        for job, rows in answers:
            job.future.set_result(EncodedRows(rows, compute_s, started_s, len(jobs)))
        return None

    def _blame(self, failures: Sequence[tuple[ForwardJob, Exception]]) -> None:
        """Answers images that failed in passes of their own, after finding out whether the model works."""
        works: bool | None = None
        for job, error in failures:
            if is_lack_of_memory(error):
                self._metrics.model_faults.inc()
                no_memory = MemoryError()
                no_memory.__cause__ = error
                job.future.set_exception(no_memory)
                continue
            if works is None:
                works = self._is_model_working()
                if not works:
                    self._metrics.model_faults.inc()
            if works:
                poisonous = ImagePoisonousError("the model fails on this image; it is not accepted")
                poisonous.__cause__ = error
                job.future.set_exception(poisonous)
            else:
                job.future.set_exception(error)

    def _is_model_working(self) -> bool:
        try:
            with self._timed():
                self._control()
        except Exception:
            self._num_failed_controls += 1
            _log.exception("the model also fails on a known good picture; no image is held responsible")
            return False
        self._num_failed_controls = 0
        return True

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        self._pass_started_s = self._clock()
        try:
            yield
        finally:
            self._pass_started_s = None


def _refuse(jobs: Sequence[ForwardJob], reason: str) -> None:
    for job in jobs:
        if job.future.running() or job.future.set_running_or_notify_cancel():
            job.future.set_exception(UnavailableError(reason))
