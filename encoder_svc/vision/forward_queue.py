"""Images that wait for the model, and the choice of those that share the next forward pass. No thread, clock or model.

A pass is filled in this order, with each image that still fits:

1. The image that was asked for first. So an image behind k others in the queue is at the latest in pass k + 1.
2. One image of each tenant by turns until the pass is full, and within a tenant one image of each caller by turns, its
   oldest first. A tenant with many calls, or a call with many images, thus takes what the others leave, and one pass
   may hold images of many calls.

Rule 1 could give one tenant two passes in a row to itself while others wait (passes of one image, or images that fill a
pass), and one caller all of its tenant's places in two passes. Then another one comes first every other time. Each of
the two exceptions doubles the bound, so k + 1 passes become 4 (k + 1) at the most.

A pass holds at most `max_images` images and `max_bytes` of pixels. Images are joined along the first axis without
padding, so only those share a pass whose tensors agree on the other axes: patches of any number (Qwen-VL), squares of
one size, equal canvases of tiles. A patch has a fixed number of bytes, so `max_bytes` bounds the patches as well.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from encoder_svc.images.image_inputs import PixelInputs
from lookonce.turns.fair_queue import CallerId, FairQueue

NameT = TypeVar("NameT", bound=Hashable)


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
        # Tenants with waiting images only, the one served longest ago first.
        self._lines: OrderedDict[str, FairQueue[ForwardJob]] = OrderedDict()
        # The tenant that had the whole last pass to itself.
        self._sole_tenant: str | None = None
        # By tenant: the caller that had all its places in the last pass in which it had any. Tenants that neither wait
        # nor had a place in the last pass are forgotten.
        self._sole_callers: dict[str, CallerId | None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, job: ForwardJob) -> None:
        """Queues an image in front of its caller's images that were asked for later."""
        self._lines.setdefault(job.caller.tenant, FairQueue()).put(job.caller, job.number, job)

    def plan(self) -> list[ForwardJob]:
        """Returns the images of the next pass and leaves them in the queue; empty only when nothing waits."""
        chosen: list[ForwardJob] = []
        tenants = deque(self._callers_in_turn(tenant) for tenant in self._tenants_in_turn())
        while tenants and len(chosen) < self._max_images:
            callers = tenants.popleft()
            job = self._next_that_fits(callers, chosen)
            if job is not None:
                chosen.append(job)
                tenants.append(callers)
        return chosen

    def take(self, plan: Sequence[ForwardJob]) -> None:
        """Removes the images of a plan. The queue must not have changed since the plan was made."""
        callers: dict[str, set[CallerId]] = {}
        for job in plan:
            tenant = job.caller.tenant
            taken = self._lines[tenant].take(job.caller)
            assert taken is job, "a plan holds the oldest images of each caller"
            callers.setdefault(tenant, set()).add(job.caller)
            self._lines.move_to_end(tenant)
        for tenant, served in callers.items():
            self._sole_callers[tenant] = _sole(served)
            self._forget_if_empty(tenant)
        for tenant in self._sole_callers.keys() - self._lines.keys() - callers.keys():
            del self._sole_callers[tenant]
        self._sole_tenant = _sole(callers)

    def discard(self, caller: CallerId, number: int) -> None:
        """Removes one image if it is still waiting."""
        if caller.tenant in self._lines:
            self._lines[caller.tenant].discard(caller, number)
            self._forget_if_empty(caller.tenant)

    def clear(self) -> list[ForwardJob]:
        """Removes and returns all waiting images."""
        lines = list(self._lines.values())
        self._lines.clear()
        return [job for line in lines for job in line.clear()]

    def _tenants_in_turn(self) -> Sequence[str]:
        """Tenants in the order in which they get their first places in the next pass."""
        if not self._lines:
            return ()
        oldest = min(self._lines, key=lambda tenant: self._lines[tenant].oldest()[0])
        return _led(list(self._lines), oldest, self._sole_tenant)

    def _callers_in_turn(self, tenant: str) -> deque[Iterator[ForwardJob]]:
        """Each caller's images, the callers in the order in which they get the tenant's places in the next pass."""
        line = self._lines[tenant]
        _, oldest = line.oldest()
        return deque(line.waiting(caller) for caller in _led(line.callers(), oldest, self._sole_callers.get(tenant)))

    def _next_that_fits(self, callers: deque[Iterator[ForwardJob]], chosen: Sequence[ForwardJob]) -> ForwardJob | None:
        """Takes the next image that fits beside the chosen ones, and puts its caller behind the others."""
        num_bytes = sum(job.inputs.size_bytes for job in chosen)
        while callers:
            line = callers.popleft()
            job = next(line, None)
            # A line without an image that fits is dropped: a caller's later images do not overtake this one.
            if job is not None and (
                not chosen
                or (num_bytes + job.inputs.size_bytes <= self._max_bytes and chosen[0].inputs.goes_with(job.inputs))
            ):
                callers.append(line)
                return job
        return None

    def _forget_if_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]


def _led(in_turn: Sequence[NameT], oldest: NameT, sole: NameT | None) -> list[NameT]:
    """The names in turn, led by the one with the oldest image. If it had everything last time, another one leads."""
    others = [name for name in in_turn if name != oldest]
    if others and oldest == sole:
        return [others[0], oldest, *others[1:]]
    return [oldest, *others]


def _sole(names: Collection[NameT]) -> NameT | None:
    return next(iter(names)) if len(names) == 1 else None
