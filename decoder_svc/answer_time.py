"""Estimates how long a new request would take until its answer is complete. Refuses nobody: the request gate does."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.engine.figures import EngineLoad

# Weight of an ended request in the means, which so follow a change of traffic within some tens of requests.
_WEIGHT = 0.05
# Share of KV blocks in use from which the pool, not `max_running_requests`, limits how many requests run.
_FULL_POOL = 0.9
# Tenants that are remembered, those whose requests ended last.
_MAX_TENANTS = 1024


@dataclass(slots=True)
class _Means:
    """The means of requests that have ended."""

    # Seconds from first step to end, and generated tokens.
    served_s: float
    num_tokens: float

    def add(self, served_s: float, num_tokens: int) -> None:
        self.served_s += _WEIGHT * (served_s - self.served_s)
        self.num_tokens += _WEIGHT * (num_tokens - self.num_tokens)

    def served_now_s(self, step_s: float) -> float:
        """Returns the serving time, which is longer than it was if the load has grown and steps take longer."""
        return max(self.served_s, self.num_tokens * step_s)


class AnswerTimeEstimator:
    """Mean serving times of the latest requests, applied to the queue that a new request would join.

    The queue moves at the pace of all tenants' requests. A request takes as long as the others of its tenant.
    """

    def __init__(self, max_running_requests: int) -> None:
        """`max_running_requests`: requests in the running batch when the KV pool does not limit them."""
        self._max_running = max_running_requests
        # None: no request has ended.
        self._all: _Means | None = None
        self._tenants: dict[str, _Means] = {}

    def expected_s(self, num_live: int, num_ahead: int, load: EngineLoad, max_tokens: int | None, tenant: str) -> float:
        """Returns the seconds until a request that arrives now has its answer; 0 while it need not wait to run.

        Of the `num_live` requests in the engine or in preparation, `num_ahead` run before the new one. They are assumed
        to leave at the mean pace. The estimate is too low where an encoder or the encoder cache holds requests up, and
        for the first answers of a tenant, about which nothing is known: only their wait counts.
        """
        if self._all is None or num_live < self._max_running:
            return 0.0
        num_places = self.num_places(load)
        wait_s = max(0, num_ahead + 1 - num_places) * self._all.served_now_s(load.step_s) / num_places
        own = self._tenants.get(tenant)
        if own is None:
            return wait_s
        share = 1.0 if max_tokens is None else min(1.0, max_tokens / own.num_tokens)
        return wait_s + share * own.served_now_s(load.step_s)

    def num_places(self, load: EngineLoad) -> int:
        """Returns how many requests can run at once, as far as blocks of the KV pool allow it now."""
        return max(1, load.running_requests) if load.kv_cache_usage >= _FULL_POOL else self._max_running

    def note_served(self, served_s: float, num_tokens: int, tenant: str) -> None:
        """Adds a tenant's request whose answer of `num_tokens` tokens ended `served_s` seconds after its first step."""
        num_tokens = max(1, num_tokens)
        if self._all is None:
            self._all = _Means(served_s, num_tokens)
        else:
            self._all.add(served_s, num_tokens)
        # The latest tenant is the last one.
        own = self._tenants.pop(tenant, None)
        if own is None:
            own = _Means(served_s, num_tokens)
        else:
            own.add(served_s, num_tokens)
        self._tenants[tenant] = own
        if len(self._tenants) > _MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
