"""Pictures that no other test has used, with the answer that plain `transformers` gives for each of them alone.

The answers differ pairwise, and those whose next-best token comes close are left out: a wrong picture, a wrong row or a
torn read shows as a wrong answer.
"""

from __future__ import annotations

import functools
import io
import itertools
from dataclasses import dataclass

import PIL.Image

from demo.chats import Message
from demo.evaluate import DemoModel
from demo.scenes import png_bytes, random_scene
from tests.conftest import DEMO_MODEL

QUESTION = "What is in the picture?"
# Logit distance to the second-best token, over the whole answer.
MIN_MARGIN = 0.05
_seeds = itertools.count(77_000_000)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture with one shape."""

    # PNG.
    data: bytes
    # The reference's answer to QUESTION.
    answer: str


def fresh(count: int) -> list[Picture]:
    """Pictures with pairwise different answers; new ones in every call."""
    pictures: dict[str, Picture] = {}
    while len(pictures) < count:
        data = png_bytes(random_scene(next(_seeds), 1))
        answer, margin = _reference_answer(data)
        if margin >= MIN_MARGIN:
            pictures.setdefault(answer, Picture(data, answer))
    return list(pictures.values())


def _reference_answer(data: bytes) -> tuple[str, float]:
    message: Message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    return _reference().answer([[message]], [[PIL.Image.open(io.BytesIO(data))]])[0]


@functools.cache
def _reference() -> DemoModel:
    return DemoModel(DEMO_MODEL)
