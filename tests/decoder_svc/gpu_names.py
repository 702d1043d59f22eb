"""A process in place of a rank's: it says which GPUs it sees, and ends with its parent's connection."""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Connection


def main() -> None:
    """Runs the process. Its first argument is the number of the connection's file."""
    with Connection(int(sys.argv[1])) as connection:
        connection.send_bytes(os.environ.get("CUDA_VISIBLE_DEVICES", "all").encode())
        with contextlib.suppress(EOFError):
            connection.recv_bytes()


if __name__ == "__main__":
    main()
