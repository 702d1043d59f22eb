"""`make demo`, run as a newcomer runs it."""

from __future__ import annotations

import io
import pathlib
import re
import subprocess
import sys

import pytest
from rich.console import Console

from demo.questions import demo_session
from lookonce.commands.running import up
from lookonce.local.local_stack import LocalStack
from tests.conftest import DEMO_MODEL, REPOSITORY

LIMIT = "knows drawn shapes only, not photographs"


@pytest.mark.parametrize("page", ["README.md", "models/demo/README.md"])
def test_the_pages_say_what_the_demo_model_does_not_know(page: str) -> None:
    assert LIMIT in " ".join((REPOSITORY / page).read_text().split())


def test_up_says_it_of_the_demo_model_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(up, "out", Console(file=shown, width=100))
    up._announce(LocalStack(DEMO_MODEL), DEMO_MODEL)
    assert LIMIT in shown.getvalue()
    shown.truncate(0)
    up._announce(LocalStack(tmp_path), tmp_path)
    assert LIMIT not in shown.getvalue()


def test_demo_answers_all_questions_and_encodes_each_picture_once() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "demo.run"], cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    pictures = {part for question in demo_session() for part in question.parts if isinstance(part, bytes)}
    assert f"6 of 6 answers right; {len(pictures)} pictures, {len(pictures)} encodes." in process.stdout
    rows = re.findall(r"^│\s*(\d)\s*│\s*(\d+)\s*│\s*(\d+)\s*│", process.stdout, re.MULTILINE)
    assert rows[0][1] != "0", "the first look encodes"
    assert LIMIT in process.stdout
    assert rows[1][1] == "0", "the second question about the same picture encodes nothing"
    assert rows[5][1] == "0", "nor does the question for JSON about a picture that was described"
