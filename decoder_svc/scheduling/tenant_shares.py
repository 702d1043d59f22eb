"""Tenants share the decoder: whose turn it is, who may start before the others' requests, and who gives a place.

Turns (tenant_turns.py) decide in which order requests start. They cannot help a tenant whose places were taken by
another one's requests while it had none waiting, and running answers may be long. So a tenant that runs fewer requests
than an equal share may start before the others, and the tenant that runs most gives places for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from decoder_svc.scheduling.request import Request, RequestState
from decoder_svc.scheduling.tenant_turns import TenantTurns, expected_tokens


@dataclass(frozen=True, slots=True)
class Claims:
    """Places of the running batch for tenants that have less than an equal share."""

    # Places of each tenant if all had as many.
    share: int
    # By tenant, how many of its waiting requests may start before the others'.
    num_places: Mapping[str, int]
    # The latest turn that such a request may have. It lies as far ahead, in tokens, as the largest tenant's running
    # requests have, and at least as an equal share of them: a tenant with few but much longer requests has had its
    # share of the work.
    latest_turn: int


class TenantShares:
    """Gives requests their turns, and counts the live and the running ones of each tenant."""

    def __init__(self) -> None:
        self._turns = TenantTurns()
        self._num_live: Counter[str] = Counter()
        self._num_running: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        """Sets the turn of a request that has arrived, and counts it."""
        self._turns.add(request)
        self._num_live[request.tenant] += 1

    def start(self, request: Request) -> None:
        """Counts a request that runs from now on."""
        self._turns.serve(request)
        self._num_running[request.tenant] += 1

    def stop(self, request: Request) -> None:
        """Counts a request that was preempted."""
        self._num_running[request.tenant] -= 1

    def end(self, request: Request, *, has_run: bool) -> None:
        """Forgets a request that has ended, and its tenant if it was the last one.

        `has_run`: it runs until now, or did before it was preempted. One for which others gave their places counts like
        one that has run, so that a client cannot have places given again and again by cancelling.
        """
        if request.state is RequestState.RUNNING:
            self.stop(request)
        self._turns.remove(request, was_served=has_run or request.has_claimed)
        self._num_live[request.tenant] -= 1
        if self._num_live[request.tenant] == 0:
            for counts in (self._num_live, self._num_running):
                del counts[request.tenant]

    @property
    def num_tenants(self) -> int:
        """Number of tenants with live requests."""
        return len(self._num_live)

    def claims(self, num_places: int, priority: int, running: Sequence[Request]) -> Claims | None:
        """Returns what tenants may have before others; None if no tenant waits with less than an equal share.

        `num_places` requests can run if some of those that run give their places. The requests that come first have
        this priority. If there are more tenants than places, a share is one place, and some have none for a while.
        """
        if not self._num_running.total():
            return None
        share = max(1, num_places // len(self._num_live))
        largest = max(self._num_running, key=self._num_running.__getitem__)
        lacking = {
            tenant: share - self._num_running[tenant]
            for tenant, num_live in self._num_live.items()
            if self._num_running[tenant] < min(share, num_live)
        }
        if not lacking:
            return None
        # A long answer counts with what it has become by now.
        num_tokens = sum(max(expected_tokens(one), one.num_tokens) for one in running if one.tenant == largest)
        num_running = self._num_running[largest]
        max_lead = num_tokens * max(share, num_running) // num_running + self._turns.unseen_surplus(largest, priority)
        return Claims(share, lacking, self._turns.now(priority) + max_lead)

    def requests_to_yield(self, running: Sequence[Request], claimant: Request, share: int) -> Iterator[Request]:
        """Yields the running requests that give their places to a claimant, one after the other, as long as it asks.

        Each is the latest one of the tenant that then runs most, if that is more than its share. Those with a higher
        priority than the claimant stay.
        """
        num_running = Counter(self._num_running)
        latest: dict[str, list[Request]] = {}
        for request in running:
            if request.priority >= claimant.priority:
                latest.setdefault(request.tenant, []).append(request)
        while latest:
            largest = max(latest, key=num_running.__getitem__)
            if num_running[largest] <= share:
                return
            num_running[largest] -= 1
            yield latest[largest].pop()
            if not latest[largest]:
                del latest[largest]
