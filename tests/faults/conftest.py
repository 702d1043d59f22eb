"""The fingerprint model, and pictures with the answers that plain `transformers` gives on the same weights."""

from __future__ import annotations

import pathlib
import random
from dataclasses import dataclass

import pytest

from lookonce.aio import AsyncClient
from lookonce.generation import Generation, Message
from tests import fingerprint_model
from tests.fingerprint_model import NUM_ROWS, Board, Reference

QUESTION = "What is in the picture?"
STORY = "Tell me about shapes."
STORY_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that nobody has seen, with the reference's answer to QUESTION."""

    data: bytes
    token_ids: tuple[int, ...]


class Fingerprint:
    """The model's folder and its reference."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = fingerprint_model.build(folder)
        self._reference = Reference(self.folder)
        self._rng = random.Random(77)
        self.story = self._reference.answer(STORY, max_tokens=STORY_TOKENS).token_ids

    def fresh(self, count: int) -> list[Picture]:
        """New pictures in every call; the second of two neighbours differs in one square only."""
        boards: list[Board] = []
        for number in range(count):
            is_second = number % 2
            board = fingerprint_model.with_one_other_square(boards[-1], self._rng) if is_second else self._random()
            boards.append(board)
        return [Picture(fingerprint_model.png(board), self._answer(board)) for board in boards]

    def slow(self) -> Picture:
        """A new picture that takes more than a second to decode."""
        board = self._random()
        return Picture(fingerprint_model.large_jpeg(board), self._answer(board))

    def _random(self) -> Board:
        return fingerprint_model.random_board(self._rng)

    def _answer(self, board: Board) -> tuple[int, ...]:
        return self._reference.answer(QUESTION, [board]).token_ids


@pytest.fixture(scope="session")
def fingerprint(tmp_path_factory: pytest.TempPathFactory) -> Fingerprint:
    return Fingerprint(tmp_path_factory.mktemp("models") / "fingerprint")


async def describe(client: AsyncClient, picture: Picture, *, timeout_s: float = 30.0) -> Generation:
    """Asks QUESTION; every row is read anew, since the prefix cache is passed by."""
    return await client.generate(
        [Message("user", (QUESTION, picture.data))],
        max_tokens=NUM_ROWS,
        temperature=0.0,
        bypass_prefix_cache=True,
        timeout_s=timeout_s,
    )


async def tell_story(client: AsyncClient, *, timeout_s: float = 60.0) -> tuple[int, ...]:
    """Asks for a story, without a picture, and returns its tokens."""
    answer = await client.generate(STORY, max_tokens=STORY_TOKENS, temperature=0.0, timeout_s=timeout_s)
    return answer.token_ids
