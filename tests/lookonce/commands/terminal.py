"""Runs the command on a pseudo-terminal, for what it does only for people."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys

from tests.conftest import REPOSITORY


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, environment: dict[str, str], *arguments: str, term: str = "dumb") -> None:
        self._end, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lookonce.cli", *arguments],
            env=environment | {"TERM": term}, cwd=REPOSITORY, stdin=other, stdout=other, stderr=other,
        )  # fmt: skip
        os.close(other)
        self._shown = ""

    def write(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, text: str) -> None:
        """Reads until the terminal has shown a text, and takes what came before it as read."""
        while text not in self._shown:
            assert select.select([self._end], [], [], 60)[0], self._shown
            self._shown += os.read(self._end, 1024).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)
