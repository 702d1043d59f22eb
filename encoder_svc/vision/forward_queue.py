"""Images that wait for the model, and which of them share the next forward pass. No thread, no clock, no model.

A pass takes images in this order, each one that still fits:

1. The image that was asked for first. So an image before which k others of the queue were asked for is at the latest
   in pass k + 1.
2. One image of each caller by turns, its oldest first, until the pass is full: a call with many images takes what the
   others leave, and one pass may hold images of many calls.

Where rule 1 would give a caller two passes in a row to itself while others wait (passes of one image, or images that
fill a pass), another caller comes first every other time; k + 1 passes are then 2 (k + 1) at the most.

What fits: `max_images`, and `max_bytes` of pixels. Images are joined along the first axis without padding, so only
those go together whose tensors agree on the others: patches of any number (Qwen-VL), squares of one size, equal
canvases of tiles. A patch has a fixed number of bytes, so that `max_bytes` bounds the patches as well.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NewType

import torch

from encoder_svc.images.image_inputs import PixelInputs

CallerId = NewType("CallerId", str)
"""Whose image it is: images of one caller take turns with those of others."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """What the model gave for one image."""

    # [num_rows, hidden_size], contiguous.
    rows: torch.Tensor
    # Duration of the forward pass that the image was part of, seconds.
    compute_s: float
    # When that began, on the batcher's clock.
    began_s: float = 0.0
    # Images in it.
    num_together: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class ForwardJob:
    """One image that waits for the model."""

    inputs: PixelInputs
    caller: CallerId
    # Position among all images ever asked for.
    number: int
    # When it was queued, seconds of the batcher's clock.
    arrived_s: float
    future: Future[EncodedRows] = field(default_factory=Future)


class ForwardQueue:
    """Images in the order in which they were asked for, by caller. Not safe for threads."""

    def __init__(self, max_images: int, max_bytes: int) -> None:
        """Bounds of one pass; one image alone may exceed `max_bytes`."""
        self._max_images = max_images
        self._max_bytes = max_bytes
        # Only callers that wait: by when they were last served or, if not since they wait, by when they came.
        self._lines: OrderedDict[CallerId, deque[ForwardJob]] = OrderedDict()
        self._num_waiting = 0
        # The caller that had the whole last pass.
        self._sole_caller: CallerId | None = None

    def __len__(self) -> int:
        return self._num_waiting

    def put(self, job: ForwardJob) -> None:
        """Queues an image, before those of its caller that were asked for later."""
        line = self._lines.setdefault(job.caller, deque())
        num_later = sum(other.number > job.number for other in line)
        line.insert(len(line) - num_later, job)
        self._num_waiting += 1

    def plan(self) -> list[ForwardJob]:
        """The images of the next pass, which stay in the queue; empty only when nothing waits."""
        chosen: list[ForwardJob] = []
        num_bytes = 0
        turns = deque(iter(self._lines[caller]) for caller in self._in_turn())
        while turns and len(chosen) < self._max_images:
            line = turns.popleft()
            job = next(line, None)
            if job is None:
                continue
            if chosen and not (
                num_bytes + job.inputs.size_bytes <= self._max_bytes and chosen[0].inputs.goes_with(job.inputs)
            ):
                # The caller's next ones do not overtake it.
                continue
            chosen.append(job)
            num_bytes += job.inputs.size_bytes
            turns.append(line)
        return chosen

    def is_full(self, plan: Sequence[ForwardJob]) -> bool:
        """Whether images that come later could not join this plan, or would have to overtake others for it."""
        return len(plan) == self._max_images or len(plan) < self._num_waiting

    def take(self, plan: Sequence[ForwardJob]) -> None:
        """Removes the images of a plan that was made since the last change."""
        for job in plan:
            line = self._lines[job.caller]
            taken = line.popleft()
            assert taken is job, "a plan holds the oldest images of each caller"
            self._lines.move_to_end(job.caller)
            if not line:
                del self._lines[job.caller]
        self._num_waiting -= len(plan)
        callers = {job.caller for job in plan}
        self._sole_caller = callers.pop() if len(callers) == 1 else None

    def discard(self, caller: CallerId, number: int) -> None:
        """Removes one image, if it still waits."""
        line = self._lines.get(caller, deque())
        job = next((job for job in line if job.number == number), None)
        if job is None:
            return
        line.remove(job)
        if not line:
            del self._lines[caller]
        self._num_waiting -= 1

    def clear(self) -> list[ForwardJob]:
        """Removes and returns everything."""
        jobs = [job for line in self._lines.values() for job in line]
        self._lines.clear()
        self._num_waiting = 0
        return jobs

    def _in_turn(self) -> list[CallerId]:
        """Callers in the order in which they get their first places."""
        if not self._lines:
            return []
        oldest = min(self._lines, key=lambda caller: self._lines[caller][0].number)
        others = [caller for caller in self._lines if caller != oldest]
        if others and oldest == self._sole_caller:
            return [others[0], oldest, *others[1:]]
        return [oldest, *others]
