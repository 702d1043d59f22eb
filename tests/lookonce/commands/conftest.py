"""A server that stands in for decoder and encoder, and the environment of commands that ask it."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import TypeAlias

import pytest

from lookonce.testing import FakeRequest, FakeServer
from tests.lookonce.command import clean_environment, run_here
from tests.tiny_models import random_image

Command: TypeAlias = Callable[..., CompletedProcess[str]]


class HeldAnswers:
    """Answers. The one to "slow" is held back until the end of the test, that to "colour" has control characters."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.is_over = threading.Event()

    def answer(self, request: FakeRequest) -> str:
        if request.text.endswith("slow"):
            self.asked.set()
            self.is_over.wait()
        return "a \x1b[31mred\x07 thing" if request.text.endswith("colour") else "a red square"


@pytest.fixture
def held() -> Iterator[HeldAnswers]:
    answers = HeldAnswers()
    yield answers
    answers.is_over.set()


@pytest.fixture
def server(held: HeldAnswers) -> Iterator[FakeServer]:
    with FakeServer(held.answer) as running:
        yield running
        # The server waits for its answers when it ends.
        held.is_over.set()


@pytest.fixture
def environment(server: FakeServer, tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment whose decoder is `server`."""
    (tmp_path / "run").mkdir(mode=0o700)
    return clean_environment(tmp_path / "run") | {"LOOKONCE_TARGET": server.target}


@pytest.fixture
def command(environment: dict[str, str]) -> Command:
    """`command("generate", "hello")` runs a command that asks `server`."""
    return lambda *arguments, stdin="": run_here(environment, *arguments, stdin=stdin)


@pytest.fixture
def pictures(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with three pictures, of which one is in a subfolder, and two files that are no pictures."""
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for seed, name in enumerate(("2.png", "10.png", "more/a.png")):
        random_image(seed).save(folder / name)
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden.png").write_bytes((folder / "2.png").read_bytes())
    return folder
