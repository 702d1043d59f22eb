"""Processes of a slow service, for tests of the server shell."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lookonce.server.program_process import ProgramProcess


@pytest.fixture
def processes(tmp_path: pathlib.Path) -> Iterator[Any]:
    started: list[ProgramProcess] = []

    def start(*flags: str) -> ProgramProcess:
        started.append(ProgramProcess(tmp_path, *flags))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()
        process.popen.wait()
        process.log_file.close()
