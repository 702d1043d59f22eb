"""Log lines about writes that the shared cache refuses. Only counters would show them otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lookonce.logs import get_logger
from lookonce.store.redis.miss_reason import MissReason

_log = get_logger(__name__)

# Seconds between two lines with the same reason.
_INTERVAL_S = 60.0
# Error replies that do not end by themselves. A full server (OOM) has a metric and an alert of its own.
_REFUSALS = frozenset(
    {MissReason.AUTH, MissReason.NOPERM, MissReason.READONLY, MissReason.MISCONF, MissReason.SERVER_ERROR}
)


class RefusalLog:
    """Warns of refused writes, at most once a minute for each reason. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Time of the last line, by reason.
        self._logged_s: dict[MissReason, float] = {}

    def note(self, reason: MissReason) -> None:
        """Takes the reason for which a write failed. The server's own text stays out: it may hold keys."""
        if reason not in _REFUSALS:
            return
        now_s = self._clock()
        with self._lock:
            last_s = self._logged_s.get(reason)
            if last_s is not None and now_s - last_s < _INTERVAL_S:
                return
            self._logged_s[reason] = now_s
        _log.warning("the shared cache refuses writes; images are encoded again", reason=reason.value)
