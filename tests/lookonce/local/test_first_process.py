"""Signals to a service that is process 1 of its container; the kernel drops those without a handler there."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

ROOT = pathlib.Path(__file__).parents[3]
TIMEOUT_S = 30
NAMESPACE = ["unshare", "--pid", "--fork"]
LOADING = """
import asyncio
from lookonce.server import serving
async def main():
    print("loading", flush=True)
    await asyncio.sleep(3600)
serving.run(main())
"""
DRAINING = """
import asyncio
from lookonce.process.end_signals import END_SIGNALS, end_by
from lookonce.server import serving
async def main():
    # The handlers that serve_until_stopped sets when a drain begins.
    for number in END_SIGNALS:
        end_by(number)
    print("draining", flush=True)
    await asyncio.sleep(3600)
serving.run(main())
"""
RANK = """
import sys
from decoder_svc import remote_rank
print("waiting", flush=True)
sys.argv[1:] = ["--model", "models/demo", "--leader", "127.0.0.1:9", "--rank-key-file", "{key_file}"]
remote_rank.main()
"""


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs the right to create a PID namespace")


@contextlib.contextmanager
def first_process(program: str, says: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Starts `program` as process 1 of a namespace; yields its parent and itself once it has printed `says`."""
    command = [*NAMESPACE, sys.executable, "-c", program]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().strip() == says
        (first,) = psutil.Process(waiting.pid).children()
        yield waiting, first
    finally:
        for child in psutil.Process(waiting.pid).children() if waiting.poll() is None else ():
            child.kill()
        waiting.kill()
        waiting.communicate()


def test_sigterm_ends_it_while_it_loads() -> None:
    with first_process(LOADING, "loading") as (waiting, first):
        first.send_signal(signal.SIGTERM)
        assert waiting.wait(TIMEOUT_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(number: signal.Signals) -> None:
    with first_process(DRAINING, "draining") as (waiting, first):
        first.send_signal(number)
        assert waiting.wait(TIMEOUT_S) == 128 + number


def test_without_a_handler_the_kernel_passes_nothing_on() -> None:
    """Checks the premise of the tests above on this machine."""
    program = "import time; print('deaf', flush=True); time.sleep(3600)"
    with first_process(program, "deaf") as (waiting, first):
        first.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert waiting.poll() is None


def test_sigterm_ends_a_rank_that_waits_for_its_decoder(tmp_path: pathlib.Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("5a" * 32)
    with first_process(RANK.format(key_file=key_file), "waiting") as (waiting, first):
        deadline_s = time.monotonic() + TIMEOUT_S
        while waiting.poll() is None and time.monotonic() < deadline_s:
            # Until its settings are read, the kernel drops the signal.
            with contextlib.suppress(psutil.NoSuchProcess):
                first.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert waiting.poll() == 128 + signal.SIGTERM
