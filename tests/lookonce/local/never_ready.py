"""`python -m tests.lookonce.local.never_ready` waits for a signal and never writes its ready file."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.pause()
