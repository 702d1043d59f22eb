"""Images that wait for the model, and the choice of those that share the next forward pass. No thread, clock or model.

A pass is filled in this order, with each image that still fits:

1. The image that was asked for first. So an image behind k others in the queue is at the latest in pass k + 1.
2. One image of each caller by turns, its oldest first, until the pass is full. A call with many images thus takes what
   the others leave, and one pass may hold images of many calls.

Rule 1 could give one caller two passes in a row to itself while others wait (passes of one image, or images that fill a
pass). Then another caller comes first every other time, and k + 1 passes become 2 (k + 1) at the most.

A pass holds at most `max_images` images and `max_bytes` of pixels. Images are joined along the first axis without
padding, so only those share a pass whose tensors agree on the other axes: patches of any number (Qwen-VL), squares of
one size, equal canvases of tiles. A patch has a fixed number of bytes, so `max_bytes` bounds the patches as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from encoder_svc.fair_queue import CallerId, FairQueue
from encoder_svc.images.image_inputs import PixelInputs


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The model's output for one image."""

    # [num_rows, hidden_size], contiguous.
    rows: torch.Tensor
    # Duration of the forward pass that the image was part of, seconds.
    compute_s: float
    # Start of that pass on the batcher's clock, seconds.
    began_s: float = 0.0
    # Images in that pass.
    num_together: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class ForwardJob:
    """One image that waits for the model."""

    inputs: PixelInputs
    caller: CallerId
    # Position among all images ever asked for.
    number: int
    # Time of its queueing on the batcher's clock, seconds.
    arrived_s: float
    future: Future[EncodedRows] = field(default_factory=Future)


class ForwardQueue:
    """The waiting images and the rules that choose the next pass. Not safe for threads."""

    def __init__(self, max_images: int, max_bytes: int) -> None:
        """`max_images` and `max_bytes` bound one pass; one image alone may exceed `max_bytes`."""
        self._max_images = max_images
        self._max_bytes = max_bytes
        self._jobs: FairQueue[ForwardJob] = FairQueue()
        # The caller that had the whole last pass to itself.
        self._sole_caller: CallerId | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: ForwardJob) -> None:
        """Queues an image in front of its caller's images that were asked for later."""
        self._jobs.put(job.caller, job.number, job)

    def plan(self) -> list[ForwardJob]:
        """Returns the images of the next pass and leaves them in the queue; empty only when nothing waits."""
        chosen: list[ForwardJob] = []
        num_bytes = 0
        lines = deque(self._jobs.waiting(caller) for caller in self._callers_in_turn())
        while lines and len(chosen) < self._max_images:
            line = lines.popleft()
            job = next(line, None)
            if job is None:
                continue
            if chosen and not (
                num_bytes + job.inputs.size_bytes <= self._max_bytes and chosen[0].inputs.goes_with(job.inputs)
            ):
                # The whole line is dropped: a caller's later images do not overtake this one.
                continue
            chosen.append(job)
            num_bytes += job.inputs.size_bytes
            lines.append(line)
        return chosen

    def take(self, plan: Sequence[ForwardJob]) -> None:
        """Removes the images of a plan. The queue must not have changed since the plan was made."""
        for job in plan:
            taken = self._jobs.take(job.caller)
            assert taken is job, "a plan holds the oldest images of each caller"
        callers = {job.caller for job in plan}
        self._sole_caller = callers.pop() if len(callers) == 1 else None

    def discard(self, caller: CallerId, number: int) -> None:
        """Removes one image if it is still waiting."""
        self._jobs.discard(caller, number)

    def clear(self) -> list[ForwardJob]:
        """Removes and returns all waiting images."""
        return self._jobs.clear()

    def _callers_in_turn(self) -> list[CallerId]:
        """Callers in the order in which they get their first places in the next pass."""
        if not self._jobs:
            return []
        oldest = self._jobs.caller_of_oldest()
        others = [caller for caller in self._jobs.callers() if caller != oldest]
        if others and oldest == self._sole_caller:
            return [others[0], oldest, *others[1:]]
        return [oldest, *others]
