"""`python -m benchmarks.watching_client TARGET METHOD`: a client that shows how long a service keeps it waiting.

It prints a line when its first call has been answered. Then it calls on and on, one call at a time, with an empty
message, until a line or the end comes on its input, and prints the beginning and the end of each call as JSON: seconds
of the system's monotonic clock.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import grpc

_TIMEOUT_S = 20.0
# Without a pause, the client alone would keep a processor busy.
_PAUSE_S = 0.001


def main(target: str, method: str) -> None:
    """Calls until the input says something."""
    ended = threading.Event()

    def await_end() -> None:
        sys.stdin.readline()
        ended.set()

    calls = []
    with grpc.insecure_channel(target) as channel:
        call: Any = channel.unary_unary(method)
        call(b"", timeout=_TIMEOUT_S)
        print("ready", flush=True)
        threading.Thread(target=await_end, daemon=True).start()
        while not ended.wait(_PAUSE_S):
            begin_s = time.monotonic()
            call(b"", timeout=_TIMEOUT_S)
            calls.append((begin_s, time.monotonic()))
    print(json.dumps(calls))


if __name__ == "__main__":
    main(*sys.argv[1:])
