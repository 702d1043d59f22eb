"""The examples on README's first page run as they stand; only the address is that of the running system."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from lookonce.local.local_stack import LocalStack
from tests.conftest import REPOSITORY
from tests.e2e.pictures import Picture, fresh

README = (REPOSITORY / "README.md").read_text()
EXAMPLES = re.findall(r"<!-- run by tests/e2e/test_readme.py -->\n```python\n(.*?)```", README, re.DOTALL)
EXAMPLE_TARGET = "127.0.0.1:50051"


@pytest.fixture
def picture(tmp_path: pathlib.Path) -> Picture:
    (picture,) = fresh(1)
    (tmp_path / "picture.png").write_bytes(picture.data)
    return picture


def run(example: str, stack: LocalStack, folder: pathlib.Path) -> str:
    assert example.count(EXAMPLE_TARGET) == 1
    code = example.replace(EXAMPLE_TARGET, stack.decoder_targets[0])
    process = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_readme_has_an_sdk_example_of_5_lines_and_a_stub_example_of_10() -> None:
    sdk, stub = (len([line for line in example.splitlines() if line.strip()]) for example in EXAMPLES)
    assert sdk <= 5
    assert stub <= 10


@pytest.mark.parametrize("example", EXAMPLES, ids=["sdk", "stub"])
def test_example_prints_the_right_answer(
    example: str, stack: LocalStack, picture: Picture, tmp_path: pathlib.Path
) -> None:
    assert run(example, stack, tmp_path).startswith(picture.answer)


def test_demo_output_in_readme_matches_the_demo(stack: LocalStack) -> None:
    from demo.questions import demo_session

    # Long answers are wrapped.
    shown = " ".join(README.split())
    for question in demo_session():
        assert f"expected {question.expected} ✓" in shown
    assert "Each picture was looked at once." in README
