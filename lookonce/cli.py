"""The entry of the `lookonce` command. Imports little, so that Ctrl-C is quiet while the commands are still loading."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never


def main() -> Never:
    """Entry point of the console script; lookonce/commands/application.py documents the exit statuses."""
    _open_closed_streams()
    with _ending_at_ctrl_c():
        from lookonce.commands.application import run
    run()


def _open_closed_streams() -> None:
    """Opens streams that the caller has closed (`>&-`) on the null device: Python has None for them.

    Their descriptors are taken as well, so that no file or socket gets the number of a standard stream.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


@contextmanager
def _ending_at_ctrl_c() -> Iterator[None]:
    """Ends the process with status 130 at Ctrl-C. An exception inside an import could be swallowed or printed."""
    is_main = threading.current_thread() is threading.main_thread()
    # A script's background process ignores Ctrl-C, and goes on to do so.
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
