"""A server that stands in for decoder and encoder, and the environment of commands that ask it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import TypeAlias

import pytest

from lookonce.testing import FakeServer
from tests.lookonce.command import clean_environment, run_here
from tests.tiny_models import random_image

Command: TypeAlias = Callable[..., CompletedProcess[str]]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer("a red square") as running:
        yield running


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
