"""While requests are live and rows can arrive, some request advances: nothing waits for itself.

The largest image, the step's tokens and the row cache are drawn as small as start-up allows (encoder_budget.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import BLOCK_SIZE, finish_step, image, request, scheduler
from tests.decoder_svc.scheduling.traffic import masked

# Steps in a row without a chunk, a fetch or an arrival after which the scheduler counts as stuck.
_NUM_IDLE_STEPS = 3


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of an album, `gap` tokens of text before it."""

    name: str
    gap: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Visit:
    """A request that shows the first `num_pictures` of an album, and arrives before the step of that number."""

    step: int
    arrival_s: float
    num_pictures: int
    num_tokens_behind: int
    priority: int = 0
    tenant: str = ""
    # Replaces the picture at this index, so that later tokens are not in the prefix cache.
    changed: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Visits of one album, with the limits under which they are served."""

    album: tuple[Picture, ...]
    visits: tuple[Visit, ...]
    token_budget: int
    spare_rows: int
    num_blocks: int
    max_num_seqs: int
    # Steps after which a fetch's rows arrive, in turns.
    delays: tuple[int, ...]
    mask: Mask
    deterministic: bool
    min_tokens: int

    def scheduler(self) -> Scheduler:
        """Returns a scheduler with the smallest limits that start-up allows, plus what the workload adds."""
        largest = max((picture.num_rows for picture in self.album), default=1)
        return scheduler(
            token_budget=max(self.token_budget, largest if self.mask is Mask.IMAGE else 1),
            num_blocks=self.num_blocks,
            cache_rows=largest + min(BLOCK_SIZE, largest) + self.spare_rows,
            max_num_seqs=self.max_num_seqs,
            rows_asked=max(self.token_budget, largest),
            deterministic=self.deterministic and self.mask is Mask.CAUSAL,
            min_tokens_before_missing_row=self.min_tokens,
        )

    def add(self, target: Scheduler, index: int) -> None:
        """Adds the visit of this index."""
        visit = self.visits[index]
        images: list[ImageItem] = []
        end = 0
        for number, picture in enumerate(self.album[: visit.num_pictures]):
            name = f"{picture.name}{picture.num_rows}" + ("'" if number == visit.changed else "")
            images.append(image(name, end + picture.gap, picture.num_rows))
            end = images[-1].span.stop
        new = request(
            f"r{index}",
            end + visit.num_tokens_behind,
            tuple(images),
            text="album",
            max_tokens=2,
            arrival_s=visit.arrival_s,
            priority=visit.priority,
            tenant=visit.tenant,
        )
        if -(-(new.num_tokens + 2) // BLOCK_SIZE) <= self.num_blocks:
            target.add(masked(new, self.mask))


def serve(workload: Workload) -> None:
    """Serves all visits. Raises AssertionError if live requests stop advancing."""
    target = workload.scheduler()
    travelling: list[tuple[int, RowFetch]] = []
    num_fetches = num_idle = number = 0
    last_visit = max(visit.step for visit in workload.visits)
    while number <= last_visit or target.has_requests():
        for index, visit in enumerate(workload.visits):
            if visit.step == number:
                workload.add(target, index)
        output = target.schedule()
        finish_step(target, output)
        for fetch in output.fetches:
            travelling.append((number + workload.delays[num_fetches % len(workload.delays)], fetch))
            num_fetches += 1
        arrived = [fetch for due, fetch in travelling if due <= number]
        travelling = [(due, fetch) for due, fetch in travelling if due > number]
        for fetch in arrived:
            target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows)
        is_idle = not (output.chunks or travelling or arrived) and target.has_requests()
        num_idle = num_idle + 1 if is_idle else 0
        assert num_idle < _NUM_IDLE_STEPS, f"stuck: {target.live_requests()}"
        number += 1
        assert number < 5000, "requests keep displacing each other"
    target.check_integrity()


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Albums with adjacent images, images smaller and larger than a block, ties in arrival, and small limits."""
    pictures = st.builds(Picture, st.sampled_from("abc"), st.sampled_from((0, 0, 1, 2, 3, 5)), st.integers(1, 10))
    album = draw(st.lists(pictures, min_size=1, max_size=8).map(tuple))
    visits = st.builds(
        Visit,
        step=st.integers(0, 6),
        arrival_s=st.sampled_from((0.0, 0.0, 1.0, 2.0)),
        num_pictures=st.integers(0, len(album)),
        num_tokens_behind=st.integers(1, 6),
        priority=st.sampled_from((0, 0, 0, 1)),
        tenant=st.sampled_from("aab"),
        changed=st.none() | st.integers(0, len(album) - 1),
    )
    num_tokens = sum(picture.gap + picture.num_rows for picture in album) + 8
    return Workload(
        album,
        draw(st.lists(visits, min_size=1, max_size=6).map(tuple)),
        token_budget=draw(st.integers(BLOCK_SIZE, 24)),
        spare_rows=draw(st.sampled_from((0, 0, 1, 4, 16))),
        num_blocks=-(-num_tokens // BLOCK_SIZE) + draw(st.sampled_from((0, 2, 40))),
        max_num_seqs=draw(st.integers(1, 4)),
        delays=draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)),
        mask=draw(st.sampled_from((Mask.CAUSAL, Mask.CAUSAL, Mask.IMAGE))),
        deterministic=draw(st.booleans()),
        min_tokens=draw(st.sampled_from((1, BLOCK_SIZE))),
    )


@settings(max_examples=300)
@given(workload=workloads())
def test_some_request_advances_while_rows_can_arrive(workload: Workload) -> None:
    serve(workload)


@pytest.mark.parametrize(("num_images", "num_rows"), [(8, 4), (12, 4), (4, 8)])
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_a_request_that_continues_the_images_of_another_is_served(
    num_images: int, num_rows: int, step: int, max_num_seqs: int
) -> None:
    """Seen with the demo model: A B C D E, while A B C D was computed, filled the row cache with claims and waited."""
    album = tuple(Picture(chr(ord("A") + index), 0, num_rows) for index in range(num_images + 1))
    visits = (Visit(0, 0.0, num_images, 1), Visit(step, 1.0, num_images + 1, 1))
    for spare_rows in range(0, num_images * num_rows + 1, BLOCK_SIZE):
        for token_budget in (BLOCK_SIZE, num_rows, 2 * num_rows, num_images * num_rows):
            workload = Workload(
                album, visits, token_budget, spare_rows, 200, max_num_seqs, (1,), Mask.CAUSAL, False, BLOCK_SIZE
            )
            serve(workload)
