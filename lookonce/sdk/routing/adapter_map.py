"""Remembers which replicas have which LoRA adapters: from their descriptions, and from their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

# A replica is asked again so long after it refused an adapter, seconds: operators load and unload adapters.
_REFUSAL_AGE_S = 10.0
# The names of refused adapters come from requests, so their number has a limit.
_MAX_REFUSALS = 4096


class AdapterMap:
    """The adapters of each replica, by address. It may be out of date. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, set[str]] = {}
        # Times of refusals, by address and adapter.
        self._refusals: dict[tuple[str, str], float] = {}

    def replace(self, address: str, adapters: Iterable[str]) -> None:
        """Takes all adapters that a replica says it serves."""
        with self._lock:
            served = self._served[address] = set(adapters)
            for adapter in served:
                self._refusals.pop((address, adapter), None)

    def note_served(self, address: str, adapter: str) -> None:
        """Notes that a replica has answered a request for an adapter."""
        with self._lock:
            self._served.setdefault(address, set()).add(adapter)
            self._refusals.pop((address, adapter), None)

    def note_refused(self, address: str, adapter: str) -> None:
        """Notes that a replica does not serve an adapter."""
        with self._lock:
            self._served.get(address, set()).discard(adapter)
            if len(self._refusals) >= _MAX_REFUSALS:
                self._refusals.clear()
            self._refusals[address, adapter] = time.monotonic()

    def served(self, address: str) -> frozenset[str]:
        """Returns the adapters that a replica had when it was last heard of."""
        with self._lock:
            return frozenset(self._served.get(address, ()))

    def has_refused(self, address: str, adapter: str) -> bool:
        """Whether a replica has lately refused an adapter."""
        with self._lock:
            refused_s = self._refusals.get((address, adapter))
            return refused_s is not None and time.monotonic() - refused_s < _REFUSAL_AGE_S

    def forget(self, address: str) -> None:
        """Forgets a replica that has gone."""
        with self._lock:
            self._served.pop(address, None)
            self._refusals = {key: at_s for key, at_s in self._refusals.items() if key[0] != address}
