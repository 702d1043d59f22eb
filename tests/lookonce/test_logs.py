"""Tracebacks in processes that have not configured their logs: no local variable is in them."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
_FAIL = """
import sys
logger = sys.modules[module]._log

def fail_over(prompt):
    raise ValueError("out of luck")

try:
    fail_over("".join(reversed("tpmorp etavirp")))
except ValueError:
    logger.exception("failed", num_rows=16)
"""


@pytest.mark.parametrize("module", ["lookonce.server.interceptors", "encoder_svc.cache.done_channel"])
def test_a_process_without_configured_logs_shows_tracebacks_without_local_variables(module: str) -> None:
    program = f"module = {module!r}\nimport {module}\n{_FAIL}"
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert finished.stdout == ""
    assert "failed" in finished.stderr
    assert "num_rows=16" in finished.stderr
    assert "ValueError: out of luck" in finished.stderr
    assert "private prompt" not in finished.stderr


def test_all_loggers_come_from_the_one_place_that_sets_the_tracebacks() -> None:
    sources = [
        path
        for package in ("lookonce", "encoder_svc", "decoder_svc", "gateway_svc")
        for path in (ROOT / package).rglob("*.py")
    ]
    found = {path.relative_to(ROOT).as_posix() for path in sources if "structlog.get_logger" in path.read_text()}
    assert found == {"lookonce/logs.py"}
    configuring = {path.relative_to(ROOT).as_posix() for path in sources if "structlog.configure(" in path.read_text()}
    assert configuring == {"lookonce/logs.py", "lookonce/server/telemetry.py"}
