"""The `lookonce` command in the test's own process, for tests that are not about the start of a process.

A process takes half a second of CPU to import the command's libraries, and `lookonce doctor` takes two seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import sys
from collections.abc import Mapping
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest

from lookonce import cli


def clean_environment(folder: pathlib.Path) -> dict[str, str]:
    """Returns the environment without settings of this project; `folder` is that of the user's running programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOOKONCE_")}
    return kept | {"XDG_RUNTIME_DIR": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


def run_here(environment: Mapping[str, str], *arguments: str, stdin: str = "") -> CompletedProcess[str]:
    """Runs the command's `main` with these variables only; an exception that would be a traceback is raised."""
    command = ["lookonce", *arguments]
    with (
        patch.dict(os.environ, environment, clear=True),
        patch.object(sys, "argv", command),
        patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    status = ended.value.code
    assert isinstance(status, int)
    return CompletedProcess(command, status, stdout.getvalue(), stderr.getvalue())
