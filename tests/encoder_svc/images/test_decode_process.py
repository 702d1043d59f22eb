"""The decoding process imports only what it runs. tests/encoder_svc/images/test_decode_worker.py has the rest."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]
# Needed by the encoder's side, or by none. There is a decoding process for each processor.
NOT_NEEDED = {"encoder_svc.images.decode_worker", "numpy", "psutil", "rich", "structlog", "subprocess", "torch"}


def test_the_process_imports_nothing_that_only_the_encoder_needs() -> None:
    """It had psutil, subprocess and their dependencies: a fifth of its own memory."""
    program = "import sys, encoder_svc.images.decode_process; print(*sys.modules, sep='\\n')"
    finished = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {[str(ROOT), *sys.path]!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    imported = set(finished.stdout.splitlines())
    assert "PIL.Image" in imported
    assert imported & NOT_NEEDED == set()
