"""Refuses images that have failed fatally twice. A bounded table in memory, safe for threads."""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from encoder_svc.metrics import EncoderMetrics
from lookonce.errors import ImagePoisonousError

_MAX_STRIKES = 2
# Images in the table; the one whose last strike is longest ago is dropped first.
_MAX_REMEMBERED = 1024
# An image that crashed something an hour ago is likely to do it again, and a client that keeps sending it must not cost
# a decoding process or two passes each time. After an hour one more attempt is cheap, and a new release may handle it.
_DURATION_S = 3600.0


class Stage(enum.Enum):
    """The step at which images fail; a label of metrics."""

    DECODE = "decode"
    FORWARD = "forward"


class Quarantine:
    """Strikes per image at one stage. Its owner decides what counts as a strike and which bytes identify an image."""

    def __init__(
        self,
        stage: Stage,
        metrics: EncoderMetrics,
        *,
        duration_s: float = _DURATION_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Strikes are forgotten `duration_s` seconds after the last one."""
        self._duration_s = duration_s
        self._clock = clock
        self._strikes_metric = metrics.poisonous.labels(stage.value)
        self._refusals_metric = metrics.quarantine_refused.labels(stage.value)
        self._lock = threading.Lock()
        # Key → (number of strikes, time of the last one), ordered by that time.
        self._strikes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def check(self, key: bytes) -> None:
        """Raises ImagePoisonousError for an image in quarantine."""
        with self._lock:
            is_held = self._num_strikes(key) >= _MAX_STRIKES
        if is_held:
            self._refusals_metric.inc()
            raise ImagePoisonousError(f"the image failed fatally {_MAX_STRIKES} times; for now it is not tried again")

    def strike(self, key: bytes) -> None:
        """Records that the image failed by its own fault."""
        self._strikes_metric.inc()
        with self._lock:
            num_strikes = self._num_strikes(key) + 1
            self._strikes.pop(key, None)
            self._strikes[key] = (num_strikes, self._clock())
            while len(self._strikes) > _MAX_REMEMBERED:
                self._strikes.popitem(last=False)

    def absolve(self, key: bytes) -> None:
        """Forgets the strikes of an image that succeeded."""
        with self._lock:
            self._strikes.pop(key, None)

    def _num_strikes(self, key: bytes) -> int:
        num_strikes, last_s = self._strikes.get(key, (0, 0.0))
        return num_strikes if self._clock() - last_s <= self._duration_s else 0
