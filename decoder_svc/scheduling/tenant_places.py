"""Tenants share the running batch: who may start before the others' requests, and who gives a place.

Turns (tenant_turns.py) decide in which order requests start. They cannot help a tenant whose places were taken by
another one's requests while it had none waiting, and running answers may be long. So a tenant that runs fewer requests
than an equal share may start before the others, and the tenant that runs most gives places for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.tenant_turns import expected_tokens


@dataclass(frozen=True, slots=True)
class Claims:
    """What tenants with less than an equal share of the running requests may have."""

    # Places of each tenant if all had as many.
    share: int
    # By tenant, how many of its waiting requests may start before the others'.
    num_places: Mapping[str, int]
    # How far the turn of such a request may lie ahead, in tokens: what an equal share of the largest tenant's running
    # requests comes to. A tenant with few but much longer requests has had its share of the work.
    max_lead: int


class TenantPlaces:
    """Counts the live and the running requests of each tenant."""

    def __init__(self) -> None:
        self._num_live: Counter[str] = Counter()
        self._num_running: Counter[str] = Counter()
        # Tokens of the running requests.
        self._num_tokens: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        """Counts a request that has arrived."""
        self._num_live[request.tenant] += 1

    def start(self, request: Request) -> None:
        """Counts a request that runs from now on."""
        self._num_running[request.tenant] += 1
        self._num_tokens[request.tenant] += expected_tokens(request)

    def stop(self, request: Request) -> None:
        """Counts a request that was preempted, or that ended while it ran."""
        self._num_running[request.tenant] -= 1
        self._num_tokens[request.tenant] -= expected_tokens(request)

    def remove(self, request: Request) -> None:
        """Forgets a request that has ended, and its tenant if it was the last one."""
        self._num_live[request.tenant] -= 1
        if self._num_live[request.tenant] == 0:
            for counts in (self._num_live, self._num_running, self._num_tokens):
                del counts[request.tenant]

    @property
    def num_tenants(self) -> int:
        """Number of tenants with live requests."""
        return len(self._num_live)

    def claims(self, num_places: int) -> Claims | None:
        """Returns what tenants may have before others; None if no tenant waits with less than an equal share.

        `num_places` requests can run if some of those that run give their places.
        """
        share = num_places // len(self._num_live)
        if share == 0 or not self._num_running.total():
            return None
        largest = max(self._num_running, key=self._num_running.__getitem__)
        num_places = {
            tenant: share - self._num_running[tenant]
            for tenant, num_live in self._num_live.items()
            if self._num_running[tenant] < min(share, num_live)
        }
        if not num_places:
            return None
        return Claims(share, num_places, share * self._num_tokens[largest] // self._num_running[largest])

    def request_to_yield(self, running: Sequence[Request], claimant: Request, share: int) -> Request | None:
        """Returns the running request that gives its place to a claimant; None if none should.

        It is the latest one of the tenant that runs most, if that is more than its share, unless it has a higher
        priority than the claimant.
        """
        largest = max(self._num_running, key=self._num_running.__getitem__)
        if self._num_running[largest] <= max(share, 1):
            return None
        latest = max((one for one in running if one.tenant == largest), key=lambda one: one.serving_order)
        return latest if latest.priority >= claimant.priority else None
