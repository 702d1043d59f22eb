"""Images that failed fatally twice are refused at once for a while. A bounded table in memory, safe for threads."""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from encoder_svc.metrics import EncoderMetrics
from lookonce.errors import ImagePoisonousError

_MAX_STRIKES = 2
# The images that failed last are remembered.
_MAX_REMEMBERED = 1024


class Stage(enum.Enum):
    """Where images fail."""

    DECODE = "decode"
    FORWARD = "forward"


class Quarantine:
    """Strikes per image of one stage. Whoever owns it decides what a strike is and what names an image."""

    def __init__(
        self,
        stage: Stage,
        duration_s: float,
        metrics: EncoderMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`duration_s`: strikes are forgotten so long after the last one, seconds."""
        self._duration_s = duration_s
        self._clock = clock
        self._strikes_metric = metrics.poisonous.labels(stage.value)
        self._refusals_metric = metrics.quarantine_refused.labels(stage.value)
        self._lock = threading.Lock()
        # Key → (number of strikes, time of the last one), in the order of the last ones.
        self._strikes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def check(self, key: bytes) -> None:
        """Raises ImagePoisonousError for an image in quarantine."""
        with self._lock:
            is_held = self._num_strikes(key) >= _MAX_STRIKES
        if is_held:
            self._refusals_metric.inc()
            raise ImagePoisonousError(f"the image failed fatally {_MAX_STRIKES} times; for now it is not tried again")

    def strike(self, key: bytes) -> None:
        """The image failed by its own fault."""
        self._strikes_metric.inc()
        with self._lock:
            num_strikes = self._num_strikes(key) + 1
            self._strikes.pop(key, None)
            self._strikes[key] = (num_strikes, self._clock())
            while len(self._strikes) > _MAX_REMEMBERED:
                self._strikes.popitem(last=False)

    def absolve(self, key: bytes) -> None:
        """The image succeeded: what was held against it is forgotten."""
        with self._lock:
            self._strikes.pop(key, None)

    def _num_strikes(self, key: bytes) -> int:
        num_strikes, last_s = self._strikes.get(key, (0, 0.0))
        return num_strikes if self._clock() - last_s <= self._duration_s else 0
