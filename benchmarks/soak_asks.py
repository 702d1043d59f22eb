"""Draws the asks of a soak, each with the answer of plain `transformers`: a text, or a question about some pictures."""

from __future__ import annotations

import io
import pathlib
import random
from dataclasses import dataclass

import PIL.Image

from demo.chats import Message, Part
from demo.evaluate import DemoModel
from demo.scenes import png_bytes, random_scene

# The reference generates as many.
MAX_TOKENS = 32
_MAX_PICTURES = 4
# Smallest logit distance between the best and the second-best token of a reference answer.
_MIN_MARGIN = 0.05
_FIRST_SEED = 91_000_000
_NEW_SHARE = 0.5
_QUESTIONS = (
    "What is in the picture?",
    "Where is it?",
    "How many shapes are there?",
    "What colour is the shape?",
    "Tell me about the first picture.",
    "Which shape is in the last picture?",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One question, the PNGs that stand before it, and the right answer."""

    question: str
    pictures: tuple[bytes, ...]
    answer: str


class AskSource:
    """Draws asks from a seed. Those whose answer depends on rounding are left out."""

    def __init__(self, model: pathlib.Path, rng: random.Random) -> None:
        self._model = DemoModel(model)
        self._rng = rng
        self._pool: list[bytes] = []

    def ask(self, num_pictures: int) -> Ask:
        """An ask about so many pictures, some new and some of earlier asks."""
        while True:
            question = self._rng.choice(_QUESTIONS)
            pictures = tuple(self._picture() for _ in range(num_pictures))
            answer, margin = self._answer(question, pictures)
            if margin >= _MIN_MARGIN:
                self._pool += [picture for picture in pictures if picture not in self._pool]
                return Ask(question, pictures, answer)

    def asks(self, count: int) -> list[Ask]:
        """Returns asks about 0 to 4 pictures each."""
        return [self.ask(self._rng.randint(0, _MAX_PICTURES)) for _ in range(count)]

    def _picture(self) -> bytes:
        if self._pool and self._rng.random() > _NEW_SHARE:
            return self._rng.choice(self._pool)
        return png_bytes(random_scene(_FIRST_SEED + self._rng.randrange(2**30), 1))

    def _answer(self, question: str, pictures: tuple[bytes, ...]) -> tuple[str, float]:
        images: list[Part] = [{"type": "image"} for _ in pictures]
        message: Message = {"role": "user", "content": [*images, {"type": "text", "text": question}]}
        opened = [PIL.Image.open(io.BytesIO(data)) for data in pictures]
        return self._model.answer([[message]], [opened])[0]
