"""Metrics of the server shell: whether it serves, and how long it has been draining."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge


class ServingMetrics:
    """One instance per process and registry."""

    def __init__(
        self, registry: CollectorRegistry, drain_limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`drain_limit_s` is the longest time from the beginning of a drain to the end of its last call, seconds."""
        self._clock = clock
        self._serving = Gauge(
            "lookonce_serving", "1 while the health of the service is SERVING, 0 otherwise.", registry=registry
        )
        self._drain_started_s: float | None = None
        drain = Gauge("lookonce_drain_seconds", "Time since the drain began, 0 before.", registry=registry)
        drain.set_function(lambda: self.drain_s)
        limit = Gauge(
            "lookonce_drain_limit_seconds",
            "Longest time that a drain may take: drain_delay_s and drain_timeout_s together.",
            registry=registry,
        )
        limit.set(drain_limit_s)

    @property
    def drain_s(self) -> float:
        """Time since the drain began, seconds; 0 before."""
        started_s = self._drain_started_s
        return 0.0 if started_s is None else self._clock() - started_s

    def report(self, *, is_serving: bool) -> None:
        """Notes what health says from now on: SERVING or NOT_SERVING."""
        self._serving.set(is_serving)

    def begin_drain(self) -> None:
        """Notes the beginning of the drain, from which on health says NOT_SERVING."""
        self._drain_started_s = self._clock()
        self._serving.set(False)
