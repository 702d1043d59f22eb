"""Says in the log how far a slow load of weights has come, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Callable

from lookonce.logs import get_logger

# A load that ends sooner logs nothing, and a longer one a line each time.
_INTERVAL_S = 5.0

_log = get_logger(__name__)


class LoadProgress:
    """Counts the layers that a kernel has taken over, and their bytes. For one thread.

    Weights lie in mapped files until then, so this is also the speed of a disk that is slower than the processor.
    """

    def __init__(self, work: str, num_layers: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`work` says what is done with the layers, and `clock` gives seconds."""
        self._work = work
        self._num_layers = num_layers
        self._clock = clock
        self._start_s = self._logged_s = clock()
        self._num_done = 0
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts a layer whose weights take `num_bytes`."""
        self._num_done += 1
        self._num_bytes += num_bytes
        now_s = self._clock()
        if now_s < self._logged_s + _INTERVAL_S:
            return
        self._logged_s = now_s
        _log.info(
            self._work,
            layers=self._num_done, of_layers=self._num_layers, mib=self._num_bytes >> 20,
            mib_per_s=round(self._num_bytes / 2**20 / (now_s - self._start_s), 1),
        )  # fmt: skip
