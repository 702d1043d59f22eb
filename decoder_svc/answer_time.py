"""Estimates how long a new request would take until its answer is complete. Refuses nobody: the request gate does."""

from __future__ import annotations

from decoder_svc.engine.figures import EngineLoad

# Weight of an ended request in the means, which so follow a change of traffic within some tens of requests.
_WEIGHT = 0.05
# Share of KV blocks in use from which the pool, not `max_running_requests`, limits how many requests run.
_FULL_POOL = 0.9


class AnswerTimeEstimator:
    """Mean serving time of the latest requests, applied to the queue that a new request would join."""

    def __init__(self, max_running_requests: int) -> None:
        """`max_running_requests`: requests in the running batch when the KV pool does not limit them."""
        self._max_running = max_running_requests
        # Means over ended requests: seconds from first step to end, and generated tokens. None: no request has ended.
        self._served_s: float | None = None
        self._num_tokens = 0.0

    def expected_s(self, num_live: int, num_ahead: int, load: EngineLoad, max_tokens: int | None) -> float:
        """Returns the seconds until a request that arrives now has its answer; 0 while it need not wait to run.

        Of the `num_live` requests in the engine or in preparation, `num_ahead` run before the new one. They are assumed
        to leave at the mean pace. The estimate is too low where an encoder or the encoder cache holds requests up.
        """
        if self._served_s is None or num_live < self._max_running:
            return 0.0
        num_places = self.num_places(load)
        # Steps may take longer now than they did for the requests in the mean, because the load has grown.
        served_s = max(self._served_s, self._num_tokens * load.step_s)
        wait_s = max(0, num_ahead + 1 - num_places) * served_s / num_places
        share = 1.0 if max_tokens is None else min(1.0, max_tokens / self._num_tokens)
        return wait_s + share * served_s

    def num_places(self, load: EngineLoad) -> int:
        """Returns how many requests can run at once, as far as blocks of the KV pool allow it now."""
        return max(1, load.running_requests) if load.kv_cache_usage >= _FULL_POOL else self._max_running

    def note_served(self, served_s: float, num_tokens: int) -> None:
        """Adds a request whose answer of `num_tokens` tokens ended `served_s` seconds after its first step."""
        num_tokens = max(1, num_tokens)
        if self._served_s is None:
            self._served_s, self._num_tokens = served_s, float(num_tokens)
        else:
            self._served_s += _WEIGHT * (served_s - self._served_s)
            self._num_tokens += _WEIGHT * (num_tokens - self._num_tokens)
