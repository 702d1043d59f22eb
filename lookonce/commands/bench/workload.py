"""The requests of a run, decided before it starts: which pictures each shows, and when it is sent."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lookonce.commands.bench.drawing import Drawing

Picture: TypeAlias = Drawing | pathlib.Path
"""A picture to draw, or the path of a file, which the client reads for each request."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request: its pictures, and whether any of them is shown for the first time."""

    pictures: tuple[Picture, ...]
    is_new: bool


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The shape of a workload."""

    num_requests: int
    # Pictures of each request.
    num_pictures: int
    # Probability that a picture was shown before, 0 to 1.
    reuse: float
    # Side of drawn pictures, pixels.
    size_px: int


def questions(options: WorkloadOptions, files: Sequence[pathlib.Path], numbers: random.Random) -> list[Question]:
    """Returns the requests. Pictures are `files` in random order, or drawn ones if there are none.

    When all files have been shown, further pictures are ones that were shown before.
    """
    fresh = iter(numbers.sample(list(files), len(files))) if files else _drawn(numbers, options.size_px)
    seen: list[Picture] = []
    made: list[Question] = []
    for _ in range(options.num_requests):
        chosen = [_choose(fresh, seen, options.reuse, numbers) for _ in range(options.num_pictures)]
        made.append(Question(tuple(picture for picture, _ in chosen), any(is_new for _, is_new in chosen)))
    return made


def arrival_times(num_requests: int, rate_per_s: float, numbers: random.Random) -> list[float]:
    """Returns times at which requests arrive, in seconds: a Poisson process, as independent users make it."""
    times: list[float] = []
    at_s = 0.0
    for _ in range(num_requests):
        times.append(at_s)
        at_s += numbers.expovariate(rate_per_s)
    return times


def _drawn(numbers: random.Random, size_px: int) -> Iterator[Picture]:
    while True:
        yield Drawing(numbers.getrandbits(64), size_px)


def _choose(
    fresh: Iterator[Picture], seen: list[Picture], reuse: float, numbers: random.Random
) -> tuple[Picture, bool]:
    """Returns a picture and whether it is new, and notes a new one in `seen`."""
    picture = None if seen and numbers.random() < reuse else next(fresh, None)
    if picture is None:
        return numbers.choice(seen), False
    seen.append(picture)
    return picture, True
