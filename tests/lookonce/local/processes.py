"""Waits for processes that end or become ready."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable


def soon() -> float:
    """Returns a deadline on the monotonic clock for a start on a busy machine."""
    return time.monotonic() + 60


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended and was reaped by its new parent."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds, which must happen within 30 s."""
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
