"""Tests that the tutorial's commands and programs run as they stand on its page, in two terminals, and answer the same.

Addresses are those of the running services: where the page shows one, the test learns the one that stands in its place.
"""

from __future__ import annotations

import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.conftest import REPOSITORY
from tests.lookonce.command import clean_environment

PAGE = REPOSITORY / "docs/tutorial.md"
_PROMPT = "<ready>"
# The size for which the page's tables are drawn.
_LINES, _COLUMNS = 40, 80
# Ctrl-C reaches the programs of a shell whose terminal is the session's own.
_SHELL = """\
import fcntl, os, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp("bash", ["bash", "--noprofile", "--norc", "--noediting", "-i"])
"""
# A fresh machine compiles the kernels when it starts the services for the first time.
_LONGEST_S = 240
_BLOCK = re.compile(
    r"(?P<marks>(?:^<!-- [^\n]* -->\n)*)^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"<!-- (.*) -->")
_COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_ADDRESS = re.compile(r"127\.0\.0\.1:\d+")
# Parts of an answer that differ from run to run: times, the name of a folder, and what the page leaves out.
_VARYING = re.compile(r"…|\d+ ms|\d+\.\d s|/tmp/\S+")


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._end, other = pty.openpty()
        termios.tcsetwinsize(other, (_LINES, _COLUMNS))
        modes = termios.tcgetattr(other)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(other, termios.TCSANOW, modes)
        self._shell = subprocess.Popen(
            [sys.executable, "-c", _SHELL],
            env=environment | {"TERM": "dumb", "PS1": _PROMPT, "VIRTUAL_ENV_DISABLE_PROMPT": "1"},
            cwd=REPOSITORY, stdin=other, stdout=other, stderr=other, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.until(_PROMPT)

    def run(self, command: str, *, last_line: str | None = None) -> list[str]:
        """Returns the lines of a command's output, up to `last_line` if it keeps running after that."""
        os.write(self._end, f"{command}\n".encode())
        shown = self.until(f"{last_line}\n" if last_line else _PROMPT)
        return [line.rstrip() for line in shown.splitlines() if line.strip()]

    def interrupt(self) -> None:
        """Presses Ctrl-C and waits until the command has ended."""
        os.write(self._end, b"\x03")
        self.until(_PROMPT)

    def until(self, text: str) -> str:
        """Returns what the terminal shows before `text` appears, and `text` if it is a line."""
        shown, deadline_s = "", time.monotonic() + _LONGEST_S
        while text not in shown:
            assert select.select([self._end], [], [], max(0.0, deadline_s - time.monotonic()))[0], shown
            shown += os.read(self._end, 4096).decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        return shown.removesuffix(_PROMPT)

    def close(self) -> None:
        """Ends the shell and what runs in it."""
        os.close(self._end)
        self._shell.wait(60)


@dataclass
class Reader:
    """Somebody who follows the page."""

    terminals: dict[str, Terminal]
    # Addresses of the page, and those that stand in their places on this machine.
    addresses: dict[str, str] = field(default_factory=dict)

    def follow(self, marks: list[str], kind: str, text: str) -> None:
        """Does what one block of the page says."""
        first, second = self.terminals["1"], self.terminals["2"]
        if "terminal 1 Ctrl-C" in marks:
            first.interrupt()
        if kind == "python":
            (name,) = (mark.removeprefix("file ") for mark in marks if mark.startswith("file "))
            (folder,) = second.run("pwd")
            (pathlib.Path(folder) / name).write_text(self._here(text))
            return
        assert kind == "console"
        keeps_running = "terminal 1 keeps running" in marks
        commands = [(found[1], found[2].splitlines()) for found in _COMMAND.finditer(text)]
        for number, (command, expected) in enumerate(commands):
            is_last = number == len(commands) - 1
            last_line = expected[-1] if keeps_running and is_last else None
            shown = (first if keeps_running else second).run(self._here(command), last_line=last_line)
            self._compare(expected, shown, command)

    def _here(self, text: str) -> str:
        return _ADDRESS.sub(lambda found: self.addresses[found[0]], text)

    def _compare(self, expected: list[str], shown: list[str], command: str) -> None:
        if expected == ["…"]:
            return
        assert len(shown) == len(expected), (command, shown)
        for line, other in zip(expected, shown, strict=True):
            assert re.fullmatch(_pattern(line), other), (command, line, other)
            self.addresses.update(zip(_ADDRESS.findall(line), _ADDRESS.findall(other), strict=True))


def _pattern(line: str) -> str:
    parts = re.split(f"({_VARYING.pattern}|{_ADDRESS.pattern})", line.rstrip())
    # Every second part is one that varies. Spaces after it fill a column.
    texts = [re.escape(part) if number % 2 == 0 else r"\S.*?" for number, part in enumerate(parts)]
    return re.sub(r"(\\ )+", r"\\s+", "".join(texts))


@pytest.fixture
def reader(tmp_path: pathlib.Path) -> Iterator[Reader]:
    (tmp_path / "run").mkdir(mode=0o700)
    environment = {
        name: value for name, value in clean_environment(tmp_path / "run").items() if not name.startswith("MAKE")
    }
    # No browser is opened, and folders that the page makes are the test's.
    environment |= {"BROWSER": "true", "TMPDIR": str(tmp_path), "COLUMNS": str(_COLUMNS)}
    reader = Reader({name: Terminal(environment) for name in ("1", "2")})
    yield reader
    for terminal in reader.terminals.values():
        terminal.close()


@pytest.mark.timeout(600)
def test_every_block_of_the_tutorial_runs(reader: Reader) -> None:
    blocks = list(_BLOCK.finditer(PAGE.read_text("utf-8")))
    for block in blocks:
        reader.follow(_MARK.findall(block["marks"]), block["kind"], block["text"])
    assert len(blocks) == PAGE.read_text("utf-8").count("\n```\n")
    reader.terminals["1"].interrupt()


@pytest.mark.parametrize(
    ("line", "other", "is_same"),
    [
        ("first token after 60 ms", "first token after 7 ms", True),
        ("36 encoded, 0 from", "0 encoded, 36 from", False),
        ("a red circle", "a red circle and a blue square", False),
        ("│ a │ …     │ yes │", "│ a │ 1f00a │ yes │", True),
        ("│ a │ …     │ yes │", "│ a │ 1f00a │ no  │", False),
    ],
)
def test_answers_are_compared_but_for_times_and_names(line: str, other: str, is_same: bool) -> None:
    assert bool(re.fullmatch(_pattern(line), other)) is is_same
