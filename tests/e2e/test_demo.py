"""`make demo`, run as a newcomer runs it."""

from __future__ import annotations

import re
import subprocess
import sys

from demo.questions import demo_session
from tests.conftest import REPOSITORY


def test_demo_answers_all_questions_and_encodes_each_picture_once() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "demo.run"], cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    pictures = {part for question in demo_session() for part in question.parts if isinstance(part, bytes)}
    assert f"5 of 5 answers right; {len(pictures)} pictures, {len(pictures)} encodes." in process.stdout
    rows = re.findall(r"^│\s*(\d)\s*│\s*(\d+)\s*│\s*(\d+)\s*│", process.stdout, re.MULTILINE)
    assert rows[0][1] != "0", "the first look encodes"
    assert rows[1][1] == "0", "the second question about the same picture encodes nothing"
