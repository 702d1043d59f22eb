"""The `lookonce` command in the test's own process, for tests that are not about the start of a process.

A process takes half a second of CPU to import the command's libraries, and `lookonce doctor` takes two seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest

from lookonce import cli


def run_here(environment: Mapping[str, str], *arguments: str) -> CompletedProcess[str]:
    """Runs the command's `main` with these variables only; an exception that would be a traceback is raised."""
    command = ["lookonce", *arguments]
    with (
        patch.dict(os.environ, environment, clear=True),
        patch.object(sys, "argv", command),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    status = ended.value.code
    assert isinstance(status, int)
    return CompletedProcess(command, status, stdout.getvalue(), stderr.getvalue())
