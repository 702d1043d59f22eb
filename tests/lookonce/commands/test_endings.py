"""Ctrl-C and readers that have left end a command quietly, with the statuses that the documentation names."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from lookonce.images import ImageRef
from lookonce.testing import FakeServer
from tests.conftest import REPOSITORY
from tests.lookonce.commands.conftest import HeldAnswers


def started(environment: dict[str, str], *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lookonce.cli", *arguments]
    # Python then keeps output until the end, as it does by default.
    buffered = {name: value for name, value in environment.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, env=buffered, cwd=REPOSITORY, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "what?"],
        ["generate", "what?", "--json"],
        ["lookup", "README.md"],
        ["bench", "--requests", "2"],
        ["config", "show", "gateway", "--", "--decoder-target", "127.0.0.1:1"],
    ],
)
def test_a_reader_that_has_left_is_no_traceback(environment: dict[str, str], arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with started(environment, *arguments, stdout=writing) as process:
        os.close(writing)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == ""


def interrupted(process: subprocess.Popen[str], held: HeldAnswers) -> tuple[int, list[str]]:
    """Presses Ctrl-C once the server has been asked. Returns the exit status and what was said of files and errors."""
    with process:
        assert held.asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    return process.returncode, [line for line in said.splitlines() if not line.startswith("skipped ")]


@pytest.mark.parametrize("arguments", [["generate", "slow"], ["bench", "slow", "--warm-up", "0", "--requests", "9"]])
def test_ctrl_c_ends_a_command_that_waits_for_an_answer(
    environment: dict[str, str], held: HeldAnswers, arguments: list[str]
) -> None:
    assert interrupted(started(environment, *arguments), held) == (130, [])


def test_ctrl_c_ends_encode_while_calls_are_running(
    environment: dict[str, str],
    server: FakeServer,
    held: HeldAnswers,
    pictures: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hold(images: Sequence[ImageRef]) -> int:
        held.asked.set()
        held.is_over.wait()
        return len(images)

    monkeypatch.setattr(server.images, "shown", hold)
    assert interrupted(started(environment, "encode", str(pictures)), held) == (130, [])


def shell(environment: dict[str, str], redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command whose streams a shell redirects."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "lookonce.cli", *arguments]
    return subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("redirections", "arguments", "status", "said"),
    [
        (">&-", ["lookup", "README.md"], 0, ""),
        ("<&-", ["generate", "-"], 2, "standard input is empty"),
        ("<&-", ["chat"], 0, ""),
        ("<&- >&- 2>&-", ["models"], 0, ""),
        (">/dev/full", ["lookup", "README.md"], 1, "error: stdout: No space left on device"),
        (">/dev/full", ["generate", "what?"], 1, "error: stdout: No space left on device"),
    ],
)
def test_closed_and_full_streams_are_no_traceback(
    environment: dict[str, str], redirections: str, arguments: list[str], status: int, said: str
) -> None:
    finished = shell(environment, redirections, *arguments)
    assert (finished.returncode, finished.stdout) == (status, ""), finished.stderr
    assert said in finished.stderr
    assert finished.stderr.count("error: ") <= 1
    assert "Traceback" not in finished.stderr


def test_ctrl_c_while_the_commands_are_loading_is_quiet(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """A module that loads forever stands in for one of the libraries."""
    (tmp_path / "typer.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    with started(environment | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}, "models") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
