"""The replicas that `lookonce top` watches: reads their state, and turns two readings into rates. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lookonce.client import Client
from lookonce.errors import LookonceError
from lookonce.local.metrics_page import MetricsPage, read_metrics

Kind: TypeAlias = Literal["decoder", "encoder"]
Value: TypeAlias = float | None

# A replica that does not answer in this time is shown as away.
TIMEOUT_S = 2.0
_DECODER, _ENCODER = "lookonce_decoder_", "lookonce_encoder_"


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a replica at one time."""

    # On the monotonic clock.
    at_s: float
    # Present values by their names, and counters since the start of the process.
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    kind: Kind | None = None
    # Reason for which there is no state; empty if there is one.
    fault: str = ""


@dataclass(slots=True)
class Replica:
    """One replica, and how to ask for its state. Its name is an address."""

    name: str
    _read: Callable[[], Reading]
    # The kind that it had in the last reading, or that the first one is expected to show.
    kind: Kind = "decoder"
    _last: Reading | None = None
    _before: Reading | None = None

    @classmethod
    def of_load(cls, address: str, client: Client) -> Replica:
        """Returns a decoder that is asked by GetLoad, which has no counters and so gives no rates."""
        return cls(address, lambda: _load_of(client))

    @classmethod
    def of_metrics(cls, address: str, name: str = "", kind: Kind = "decoder") -> Replica:
        """Returns a replica whose metrics are read at this address; `kind` counts until it has answered."""
        return cls(name or address, lambda: _metrics_of(address), kind)

    def look(self) -> None:
        """Takes a reading. A replica that does not answer has a fault instead of a state."""
        self._before = self._last
        try:
            self._last = self._read()
        except LookonceError as error:
            self._last = Reading(time.monotonic(), fault=error.message)
        self.kind = self._last.kind or self.kind

    @property
    def fault(self) -> str:
        """Reason for which the last reading has no state; empty if it has one."""
        return "not asked yet" if self._last is None else self._last.fault

    def value(self, name: str) -> Value:
        """Returns the present value of a gauge; None if it is not known."""
        return None if self._last is None else self._last.gauges.get(name)

    def rate(self, name: str) -> Value:
        """Returns the growth of a counter per second between the last two readings; None after a restart."""
        if self._last is None or self._before is None:
            return None
        after, before = self._last.counters.get(name), self._before.counters.get(name)
        if after is None or before is None or after < before:
            return None
        return (after - before) / max(1e-9, self._last.at_s - self._before.at_s)

    def share(self, part: str, whole: str) -> Value:
        """Returns the ratio of two counters since the start of the process; None if the second is 0 or not known."""
        counters = {} if self._last is None else self._last.counters
        return counters[part] / counters[whole] if counters.get(whole) else None


def look_at(replicas: Sequence[Replica]) -> None:
    """Takes a reading of all replicas at the same time, so that one that is away does not delay the others."""
    with ThreadPoolExecutor(max(1, len(replicas)), thread_name_prefix="top") as executor:
        list(executor.map(Replica.look, replicas))


def _load_of(client: Client) -> Reading:
    load = client.load(timeout_s=TIMEOUT_S)
    gauges = {
        "running": load.running_requests,
        "waiting": load.waiting_requests,
        "waiting_for_rows": load.waiting_for_embeddings,
        "kv_cache": load.kv_cache_usage,
        "device_rows": load.encoder_cache_rows,
    }
    return Reading(time.monotonic(), gauges, {}, "decoder")


def _metrics_of(address: str) -> Reading:
    page = read_metrics(address, TIMEOUT_S)
    at_s = time.monotonic()
    if page.has(_ENCODER):
        return Reading(at_s, _encoder_gauges(page), encoder_counters(page), "encoder")
    if page.has(_DECODER):
        return Reading(at_s, _decoder_gauges(page), _decoder_counters(page), "decoder")
    return Reading(at_s, fault="shows no metrics of an encoder or a decoder")


def _decoder_gauges(page: MetricsPage) -> dict[str, float]:
    return {
        "running": page.total(f"{_DECODER}running_requests"),
        "waiting": page.total(f"{_DECODER}waiting_requests"),
        "waiting_for_rows": page.total(f"{_DECODER}requests_waiting_for_rows"),
        "kv_cache": page.total(f"{_DECODER}kv_cache_usage"),
        "device_rows": page.total(f"{_DECODER}encoder_cache_rows"),
    }


def _decoder_counters(page: MetricsPage) -> dict[str, float]:
    rows = f"{_DECODER}image_rows_total"
    num_rows = page.total(rows)
    return {
        "generated_tokens": page.total(f"{_DECODER}generated_tokens_total"),
        "prompt_tokens": page.total(f"{_DECODER}prompt_tokens_total"),
        "prefix_hits": page.total(f"{_DECODER}prefix_cache_hit_tokens_total"),
        "prefix_queries": page.total(f"{_DECODER}prefix_cache_query_tokens_total"),
        "rows": num_rows,
        "reused_rows": num_rows - page.total(rows, tier="encoded"),
    }


def _encoder_gauges(page: MetricsPage) -> dict[str, float]:
    return {
        "queued_images": page.total(f"{_ENCODER}queued_images"),
        "cache_entries": page.total(f"{_ENCODER}local_cache_entries"),
        "cache_bytes": page.total(f"{_ENCODER}local_cache_bytes"),
    }


def encoder_counters(page: MetricsPage) -> dict[str, float]:
    queries, hits = (
        {tier: page.total(f"{_ENCODER}cache_{name}_total", tier=tier) for tier in ("local", "shared")}
        for name in ("queries", "hits")
    )
    return {
        "encodes": page.total(f"{_ENCODER}encodes_total"),
        "lookups": queries["local"],
        "hits": _num_answered(queries, hits),
    }


def _num_answered(queries: Mapping[str, float], hits: Mapping[str, float]) -> float:
    """Returns the number of look-ups that the process' own cache or the shared one answered.

    The sum of both hits can be too large: some look-ups ask the shared cache although the local one has the rows, and
    count as a hit of each. All look-ups less the misses of the shared cache is an upper bound.
    """
    shared_misses = max(0.0, queries["shared"] - hits["shared"])
    return max(hits["local"], min(hits["local"] + hits["shared"], queries["local"] - shared_misses))
