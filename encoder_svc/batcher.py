"""Images of all requests → forward passes: one thread, one bounded queue, one future per image.

A pass takes whatever waits, up to a number of images and of pixel bytes; it never waits for more. When a pass of
several images fails, each of them runs again alone, so that only the image at fault fails.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import structlog
import torch

from encoder_svc.families import PixelInputs
from encoder_svc.metrics import EncoderMetrics
from lookonce.errors import OverloadedError, UnavailableError

Forward = Callable[[Sequence[PixelInputs]], list[torch.Tensor]]

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of queue and batch."""

    # Images in one forward pass.
    max_images: int
    # Pixel bytes in one forward pass; one image alone may exceed it.
    max_bytes: int
    # Images that wait.
    max_queued: int


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """What the model gave for one image."""

    # [num_rows, hidden_size], contiguous.
    rows: torch.Tensor
    # Duration of the forward pass that the image was part of, seconds.
    compute_s: float


@dataclass(frozen=True, slots=True)
class _Job:
    inputs: PixelInputs
    future: Future[EncodedRows]


class ForwardBatcher:
    """Owns the forward thread. `submit` may be called from any thread."""

    def __init__(self, forward: Forward, limits: BatchLimits, metrics: EncoderMetrics) -> None:
        self._forward = forward
        self._limits = limits
        self._metrics = metrics
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    def submit(self, inputs: PixelInputs) -> Future[EncodedRows]:
        """Queues one image. Raises OverloadedError when the queue is full, UnavailableError after `close`.

        The future raises whatever the forward pass raised for this image alone. Cancelling it before its pass begins
        takes the image out of the queue.
        """
        job = _Job(inputs, Future())
        with self._changed:
            if self._closed:
                raise UnavailableError("the encoder is shutting down; retry on another replica")
            if len(self._waiting) >= self._limits.max_queued:
                raise OverloadedError(f"{len(self._waiting)} images wait for the model, which is the limit")
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Ends the thread after the pass in work; waiting images fail with UnavailableError."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        self._thread.join()
        for job in dropped:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(UnavailableError("the encoder is shutting down; retry on another replica"))

    def _run(self) -> None:
        while batch := self._next_batch():
            jobs = [job for job in batch if job.future.set_running_or_notify_cancel()]
            if jobs:
                self._encode(jobs)

    def _next_batch(self) -> list[_Job]:
        """Blocks for the first image; empty only after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return []
            batch = [self._waiting.popleft()]
            num_bytes = batch[0].inputs.size_bytes
            while self._waiting and len(batch) < self._limits.max_images:
                num_bytes += self._waiting[0].inputs.size_bytes
                if num_bytes > self._limits.max_bytes:
                    break
                batch.append(self._waiting.popleft())
            return batch

    def _encode(self, jobs: list[_Job]) -> None:
        started_s = time.monotonic()
        try:
            outputs = self._forward([job.inputs for job in jobs])
        except Exception as error:
            self._encode_singly(jobs, error)
            return
        compute_s = time.monotonic() - started_s
        self._metrics.forward_seconds.observe(compute_s)
        self._metrics.forward_images.observe(len(jobs))
        self._metrics.encodes.inc(len(jobs))
        for job, rows in zip(jobs, outputs, strict=True):
            job.future.set_result(EncodedRows(rows, compute_s))

    def _encode_singly(self, jobs: list[_Job], error: Exception) -> None:
        if len(jobs) == 1:
            _log.error("the forward pass of one image failed", exc_info=error)
            jobs[0].future.set_exception(error)
            return
        _log.warning("a forward pass failed; its images run again one by one", num_images=len(jobs), exc_info=error)
        for job in jobs:
            self._encode([job])
