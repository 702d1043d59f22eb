"""`lookonce bench` asks as often as it says, in both loops, and reports answers and failures."""

from __future__ import annotations

import contextlib
import json
import pathlib

import pytest

from lookonce.errors import OverloadedError
from lookonce.testing import FakeServer
from tests.lookonce.commands.conftest import Command
from tests.lookonce.commands.terminal import Terminal

SMALL = ("--requests", "12", "--size", "8", "--workload-seed", "5")


@pytest.mark.parametrize("loop", [("--callers", "3"), ("--rate", "2000")])
def test_a_run_counts_what_the_server_has_seen(
    command: Command, server: FakeServer, loop: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    files = [f"{tmp_path}/run.json", f"{tmp_path}/run.svg"]
    finished = command("bench", "Which?", *SMALL, *loop, "--json", files[0], "--plot", files[1], "--temperature", "0.5")
    assert finished.returncode == 0, finished.stderr
    assert len(server.requests) == 12 + 1, "one warms up"
    assert {request.text for request in server.requests} == {"Which?"}
    assert server.requests[5].options == {"max_tokens": 16, "temperature": 0.5}
    assert "requests\t12, of which 0 failed\n" in finished.stdout
    run = json.loads(pathlib.Path(files[0]).read_text())
    report = run["report"]
    assert len(run["requests"]) == report["num_requests"] == 12
    assert run["options"]["workload_seed"] == 5
    assert report["num_new"] == len({image.digest for image in server.images.uploads}) - 1
    assert report["image_rows"]["encoded"] == 16 * report["num_new"]
    assert report["image_rows"]["encoded"] + report["image_rows"]["cached"] == 16 * 12
    assert report["completion_tokens"] == 3 * 12
    assert all(one["latency_s"] >= one["first_text_s"] > 0 for one in run["requests"])
    assert pathlib.Path(files[1]).read_text().startswith("<svg")


def test_own_pictures_are_shown(command: Command, server: FakeServer, pictures: pathlib.Path) -> None:
    finished = command("bench", *SMALL, "--pictures", str(pictures), "--reuse", "0", "--json", "-")
    assert finished.returncode == 0, finished.stderr
    run = json.loads(finished.stdout)
    assert len({image.digest for image in server.images.uploads}) == 3
    assert run["report"]["num_new"] == 2, "the third one warmed up"


def test_a_failure_is_counted_and_not_repeated(command: Command, server: FakeServer) -> None:
    server.fail(OverloadedError("full", retry_after_s=0.01))
    finished = command("bench", *SMALL, "--warm-up", "0", "--pictures-per-request", "0")
    assert finished.returncode == 1
    assert "requests\t12, of which 1 failed\n" in finished.stdout
    assert "1 failed: OverloadedError: full" in finished.stderr
    assert len(server.requests) == 12


def test_a_failure_while_it_warms_up_ends_the_run(command: Command, server: FakeServer) -> None:
    server.fail(OverloadedError("full", retry_after_s=0.01))
    finished = command("bench", *SMALL)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("error: full")


def test_a_terminal_shows_progress_before_all_pictures_are_drawn(environment: dict[str, str]) -> None:
    """Drawing them all would take an hour."""
    many = ("slow", "--requests", "100000", "--reuse", "0", "--size", "2048", "--callers", "1", "--warm-up", "0")
    with contextlib.closing(Terminal(environment, "bench", *many, term="xterm")) as terminal:
        terminal.until("asking")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--callers", "2", "--rate", "1"], "closed loop"),
        (["--reuse", "1.5"], "--reuse"),
        (["--pictures", "none"], "does not exist"),
        (["--json", "nowhere/run.json"], "no folder nowhere"),
        (["--target", "decoder"], "with a port"),
    ],
)
def test_a_wrong_command_line_asks_nothing(
    command: Command, server: FakeServer, arguments: list[str], words: str
) -> None:
    finished = command("bench", *arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert words in " ".join(finished.stderr.replace("│", " ").split())
    assert server.requests == []


def test_a_file_that_cannot_be_written_takes_no_figures_along(command: Command, tmp_path: pathlib.Path) -> None:
    finished = command("bench", *SMALL, "--json", "/dev/full", "--plot", str(tmp_path / "run.svg"))
    assert finished.returncode == 1
    assert "requests\t12, of which 0 failed\n" in finished.stdout
    assert "error: /dev/full: No space left" in finished.stderr
    assert (tmp_path / "run.svg").exists()


def test_a_folder_without_pictures_is_refused(command: Command, tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    finished = command("bench", "--pictures", str(tmp_path / "empty"))
    assert finished.returncode == 2
    assert "no image file" in finished.stderr
