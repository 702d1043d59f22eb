"""The signals that tell a process to end, and how a further one ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_by(number: int) -> None:
    """Makes the signal end the process at once.

    The first process of a container (PID 1) needs a handler for that: the kernel drops signals for which it has none.
    """
    signal.signal(number, _exit_at_once if os.getpid() == 1 else signal.SIG_DFL)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
