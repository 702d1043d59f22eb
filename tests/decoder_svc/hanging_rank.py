"""A rank on a machine of its own that hangs in a step, as one does whose GPU waits for another rank."""

from __future__ import annotations

import sys
import threading
import time
from multiprocessing.connection import Connection

from decoder_svc import remote_rank


def main() -> None:
    """Watches rank 0 as `remote_rank` does, and hangs. Its first argument is the number of the connection's file."""
    remote_rank._LAST_STEP_S = 0.0
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=remote_rank._end_with, args=(connection,), daemon=True).start()
    connection.send_bytes(b"hangs")
    while True:
        time.sleep(600)


if __name__ == "__main__":
    main()
