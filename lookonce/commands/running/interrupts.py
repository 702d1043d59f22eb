"""Lets a command that has started services end in order."""

from __future__ import annotations

import signal


def stop_in_order() -> None:
    """Makes SIGTERM stop everything in order, as Ctrl-C does.

    SIGINT is set, too: a script's background process inherits it ignored, and then Python installs no handler.
    """
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.default_int_handler)
