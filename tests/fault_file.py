"""A file by which a test tells a running service what to do at one place of its code: hang there, fail, or die."""

from __future__ import annotations

import pathlib
import time

HANG, FAIL, DIE = "hang", "fail", "die"
_POLL_S = 0.01


class FaultFile:
    """The same object in the test, which writes, and in the service, which obeys."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def order(self, fault: str) -> None:
        """Starts the fault with the next operation."""
        draft = self._path.with_suffix(".draft")
        draft.write_text(fault)
        draft.replace(self._path)

    def clear(self) -> None:
        """Ends the fault; later operations succeed."""
        self._path.unlink()

    def obey(self) -> None:
        """Returns when there is no fault. DIE ends the thread as no `except Exception` can help."""
        while (fault := self._read()) == HANG:
            time.sleep(_POLL_S)
        if fault == FAIL:
            raise ValueError("a fault that was ordered")
        if fault == DIE:
            raise SystemExit("the end of a thread that was ordered")

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""
