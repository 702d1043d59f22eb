"""Draws requests about pictures in the shapes of published comparisons, new for every round."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass

import PIL.Image

_PICTURE_SIDE = 448
_WORDS = "what colour is the small cat near that red boat and why do you see it under a tree".split()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a question about some pictures, which stand before it."""

    pictures: tuple[bytes, ...]
    question: str


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of requests, new for every round."""

    name: str
    description: str
    # Draws the given number of requests.
    draw: Callable[[random.Random, int], list[Ask]]
    num_requests: int
    # Requests per second with the cache over the peer's.
    goal: float


def p40(rng: random.Random, num_requests: int = 40) -> list[Ask]:
    """30 % of the requests repeat the one before."""
    num_repeated = num_requests * 3 // 10
    asks = [ask_about(rng, picture(rng)) for _ in range(num_requests - num_repeated)]
    return [ask for index, ask in enumerate(asks) for _ in range(2 if index < num_repeated else 1)]


def s50(rng: random.Random, num_requests: int = 50) -> list[Ask]:
    """Ten questions about each picture, in turns."""
    pictures = [picture(rng) for _ in range(num_requests // 10)]
    return [ask_about(rng, pictures[index % len(pictures)]) for index in range(num_requests)]


def u40(rng: random.Random, num_requests: int = 40) -> list[Ask]:
    """Each request is about a picture of its own."""
    return [ask_about(rng, picture(rng)) for _ in range(num_requests)]


WORKLOADS = (
    Workload("P40", "40 requests, 30 % of them repeated, one after the other", p40, 40, goal=1.2),
    Workload("S50", "50 questions over 5 pictures, picture first", s50, 50, goal=1.2),
    Workload("U40", "40 pictures, no reuse", u40, 40, goal=1.0),
)


def ask_about(rng: random.Random, *pictures: bytes) -> Ask:
    """A question of 16 words."""
    return Ask(pictures, " ".join(rng.choices(_WORDS, k=16)) + "?")


def picture(rng: random.Random) -> bytes:
    """A JPEG of a smooth field of colours with a few boxes, as large as a photo of that size."""
    field = PIL.Image.frombytes("RGB", (8, 8), rng.randbytes(3 * 8 * 8))
    drawn = field.resize((_PICTURE_SIDE, _PICTURE_SIDE), PIL.Image.Resampling.BICUBIC)
    for _ in range(6):
        left, top = rng.randrange(_PICTURE_SIDE - 32), rng.randrange(_PICTURE_SIDE - 32)
        right, bottom = left + rng.randrange(16, _PICTURE_SIDE // 2), top + rng.randrange(16, _PICTURE_SIDE // 2)
        drawn.paste(tuple(rng.randbytes(3)), (left, top, right, bottom))
    file = io.BytesIO()
    drawn.save(file, "JPEG", quality=90)
    return file.getvalue()
