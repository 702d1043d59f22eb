"""Decides which replica gets a request: the same one for the same content, unless that one has too much to do.

Replicas are ranked for each content by rendezvous hashing (Thaler and Ravishankar, 1998): when one comes or goes, only
the contents that it wins or had move. A replica with more than its share of the requests in progress is passed over, as
in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016), so that one popular picture uses as
many replicas as it needs.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b

# Most requests in progress at one replica, relative to the mean of all.
_MAX_SHARE = 1.25
# A replica with fewer requests than these is not passed over: decoders compute several at once, and a share of few
# requests on many replicas would be less than one.
_FREE_REQUESTS = 4
# Reports are used for so long, seconds.
_REPORT_AGE_S = 5.0
# A replica at which a call failed is passed over for so long, seconds; twice as long after each further failure.
_FIRST_REST_S = 2.0
_MAX_REST_S = 30.0
_MAX_KEY_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Rest:
    """The time for which a replica is passed over."""

    length_s: float
    ends_s: float


@dataclass(frozen=True, slots=True)
class _Report:
    """The requests of other clients at one replica, as far as it is known."""

    num_others: int
    at_s: float


class Placement:
    """Chooses replicas, and counts the requests in progress at each. Thread-safe."""

    def __init__(self) -> None:
        # A garbage collection in the midst of a choice may end streams that nobody refers to, in the same thread.
        self._lock = threading.RLock()
        self._num_own: Counter[str] = Counter()
        self._reports: dict[str, _Report] = {}
        self._rests: dict[str, _Rest] = {}

    def take(self, affinity: bytes, addresses: Collection[str]) -> str:
        """Returns the address for a request with this content, and counts it there until `give_back`.

        `addresses` are those of the replicas that serve, at least one.
        """
        with self._lock:
            now_s = time.monotonic()
            trusted = [one for one in addresses if one not in self._rests or self._rests[one].ends_s <= now_s]
            loads = {address: self._load(address, now_s) for address in trusted or addresses}
            limit = max(_FREE_REQUESTS, math.ceil(_MAX_SHARE * (sum(loads.values()) + 1) / len(loads)))
            within = [address for address, load in loads.items() if load < limit]
            chosen = max(within, key=lambda address: rank(affinity, address))
            self._num_own[chosen] += 1
            return chosen

    def give_back(self, address: str) -> None:
        """Notes the end of a request."""
        with self._lock:
            self._num_own[address] -= 1

    def num_own(self, address: str) -> int:
        """Returns the number of this client's requests in progress at a replica."""
        with self._lock:
            return self._num_own[address]

    def report(self, address: str, num_requests: int) -> None:
        """Notes how many requests a replica says it has, those of this client included."""
        with self._lock:
            num_others = max(0, num_requests - self._num_own[address])
            self._reports[address] = _Report(num_others, time.monotonic())

    def succeeded(self, address: str) -> None:
        """Notes that a replica has answered."""
        with self._lock:
            self._rests.pop(address, None)

    def failed(self, address: str) -> None:
        """Notes that a replica did not answer in time or could not be reached, so that others get the next requests."""
        with self._lock:
            before = self._rests.get(address)
            length_s = _FIRST_REST_S if before is None else min(2 * before.length_s, _MAX_REST_S)
            self._rests[address] = _Rest(length_s, time.monotonic() + length_s)

    def forget(self, address: str) -> None:
        """Forgets a replica that has gone and has no request of this client any more."""
        with self._lock:
            self._num_own.pop(address, None)
            self._reports.pop(address, None)
            self._rests.pop(address, None)

    def _load(self, address: str, now_s: float) -> int:
        report = self._reports.get(address)
        is_current = report is not None and now_s - report.at_s <= _REPORT_AGE_S
        return self._num_own[address] + (report.num_others if report is not None and is_current else 0)


def rank(affinity: bytes, address: str) -> bytes:
    """Returns the rank of a replica for a content; the highest one gets it. Equal on all machines and versions."""
    return blake2b(address.encode(), key=affinity[:_MAX_KEY_BYTES], digest_size=8).digest()
