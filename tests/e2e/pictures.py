"""Pictures that no other test has used, with a question whose answer only the right picture gives."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from demo.questions import describe
from demo.scenes import png_bytes, random_scene

QUESTION = "What is in the picture?"
_seeds = itertools.count(77_000_000)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture with one shape."""

    # PNG.
    data: bytes
    # The demo model's right answer to QUESTION.
    answer: str


def fresh(count: int) -> list[Picture]:
    """Pictures with pairwise different answers; new ones in every call."""
    pictures: dict[str, Picture] = {}
    while len(pictures) < count:
        scene = random_scene(next(_seeds), 1)
        picture = Picture(png_bytes(scene), describe(scene))
        pictures.setdefault(picture.answer, picture)
    return list(pictures.values())
