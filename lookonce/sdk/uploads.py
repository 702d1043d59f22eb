"""Keeps the calls of one client from sending the same picture at the same time.

A server that lacks an image asks each call for its bytes. Where many calls ask about one new picture at once, all but
the first wait a moment and ask again by digest: the server has the image as soon as the first one has sent it, long
before that call is answered.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self, TypeAlias

# A caller and the digest of an image.
_Image: TypeAlias = "tuple[str, bytes]"

# Pauses before a call asks again, each twice as long as the one before, seconds.
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 0.4
# Longest time that a call leaves an image to another call, seconds. 20 MB take 1.6 s at 100 Mbit/s.
_MAX_WAIT_S = 3.0
# Images whose senders have ended that are remembered.
_MAX_SENT = 256


class Uploads:
    """The images that calls of one client are sending. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        # The turn that sends each image, by caller and digest.
        self._senders: dict[_Image, Turn] = {}
        # The time at which the last sender of an image ended, by caller and digest, the latest at the end.
        self._sent_s: dict[_Image, float] = {}

    def turn(self, caller: str = "") -> Turn:
        """Returns the turn of a new call. Leave its `with` block when the call has ended.

        Calls of different callers do not wait for each other: they may be tenants, each with images of its own.
        """
        return Turn(self, caller)

    def _take(self, turn: Turn, digests: Iterable[bytes], *, by_force: bool) -> bool:
        """Notes that a turn sends these images.

        Without force, returns False if another turn sends one of them, or has sent it after this one asked the server.
        """
        wanted = {(turn.caller, digest) for digest in digests}
        with self._lock:
            if not by_force:
                is_sent = any(self._sent_s.get(image, -math.inf) >= turn.asked_s for image in wanted)
                if is_sent or any(self._senders.get(image, turn) is not turn for image in wanted):
                    return False
            for image in wanted:
                self._senders.setdefault(image, turn)
            return True

    def _give_back(self, turn: Turn) -> None:
        with self._lock:
            for image in [image for image, sender in self._senders.items() if sender is turn]:
                del self._senders[image]
                self._sent_s.pop(image, None)
                self._sent_s[image] = self.clock()
            while len(self._sent_s) > _MAX_SENT:
                del self._sent_s[next(iter(self._sent_s))]


class Turn:
    """The place of one call among those that send images. Not thread-safe."""

    def __init__(self, uploads: Uploads, caller: str) -> None:
        self._uploads = uploads
        self.caller = caller
        # Time of the beginning of the current attempt, which asks the server by digest.
        self.asked_s = uploads.clock()
        self._waits_since_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self.has_sent = False

    def pause_s(self, digests: Iterable[bytes]) -> float | None:
        """Returns None if the call shall send these images now, else the seconds after which it shall ask again."""
        now_s = self._uploads.clock()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        if self._uploads._take(self, digests, by_force=now_s - self._waits_since_s >= _MAX_WAIT_S):
            self.has_sent = True
            return None
        pause_s, self._pause_s = self._pause_s, min(_MAX_PAUSE_S, 2 * self._pause_s)
        self.asked_s = now_s + pause_s
        return pause_s

    def end(self) -> None:
        """Lets others send the images of this call."""
        if self.has_sent:
            self._uploads._give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
