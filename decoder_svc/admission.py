"""Refuses a request on arrival that would not have its answer before its deadline.

A request that is late costs as much as one that is in time. Served in order, a queue longer than what deadlines allow
makes all of them late; so the queue is kept as long as they allow, and what is too much hears it at once, before
anything was done for it. Only deadlines refuse: who has time waits. Event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from decoder_svc.engine.engine_interface import EngineLoad
from lookonce.errors import OverloadedError

# Of a newly ended request in the means; they follow a change of traffic within some tens of requests.
_WEIGHT = 0.05
# Of the time that a request has, what it must be expected to need less than: half of them take longer than expected.
_SAFE_SHARE = 0.85
# KV blocks in use from which on the pool decides how many requests run.
_FULL_POOL = 0.9


class Admission:
    """Knows who is being served and how long that took lately."""

    def __init__(self, load: Callable[[], EngineLoad], max_running_requests: int) -> None:
        """`load` is the engine's, asked at every arrival once more requests are live than may run."""
        self._load = load
        self._max_running = max_running_requests
        # Live requests by priority.
        self._live: Counter[int] = Counter()
        # Means over requests: seconds from first step to end, and generated tokens; None: nobody has ended yet.
        self._served_s: float | None = None
        self._num_tokens = 0.0

    @contextmanager
    def entered(self, priority: int, max_tokens: int | None, remaining_s: float | None) -> Iterator[Callable[[], None]]:
        """Counts a request until the block ends, or what it yields is called: the engine is done with the request.

        `remaining_s` is the time to its deadline. Raises OverloadedError when it would not end before.
        """
        if remaining_s is not None:
            expected_s = self.expected_s(priority, max_tokens)
            if expected_s > _SAFE_SHARE * remaining_s:
                raise OverloadedError(
                    f"the answer would take about {expected_s:.1f} s, and the deadline is in {remaining_s:.1f} s",
                    retry_after_s=expected_s - _SAFE_SHARE * remaining_s,
                )
        self._live[priority] += 1
        is_live = True

        def leave() -> None:
            nonlocal is_live
            if is_live:
                is_live = False
                self._live[priority] -= 1
                if not self._live[priority]:
                    del self._live[priority]

        try:
            yield leave
        finally:
            leave()

    def expected_s(self, priority: int, max_tokens: int | None) -> float:
        """Seconds until a request that arrives now would have its answer; 0 while it need not wait to run.

        Those ahead leave their places at the pace of late. Where the room for rows or an encoder holds requests up, it
        takes longer: then deadlines decide.
        """
        num_live = self._live.total()
        if self._served_s is None or num_live < self._max_running:
            return 0.0
        load = self._load()
        is_pool_full = load.kv_cache_usage >= _FULL_POOL
        num_places = max(1, load.running_requests) if is_pool_full else self._max_running
        # Those who ended began in better times where the load has grown since: steps take longer, for all who run now.
        served_s = max(self._served_s, self._num_tokens * load.step_s)
        num_ahead = sum(number for other, number in self._live.items() if other <= priority)
        wait_s = max(0, num_ahead + 1 - num_places) * served_s / num_places
        share = 1.0 if max_tokens is None else min(1.0, max_tokens / self._num_tokens)
        return wait_s + share * served_s

    def note_served(self, served_s: float, num_tokens: int) -> None:
        """A request ended with an answer of so many tokens, so long after its first step."""
        num_tokens = max(1, num_tokens)
        if self._served_s is None:
            self._served_s, self._num_tokens = served_s, float(num_tokens)
        else:
            self._served_s += _WEIGHT * (served_s - self._served_s)
            self._num_tokens += _WEIGHT * (num_tokens - self._num_tokens)
