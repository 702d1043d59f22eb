"""Tenants take turns: a request's place in the queue depends on what its tenant has asked for lately.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each request gets a number, its turn, when it arrives. It is
where the tenant's request before it ends, in tokens, or the turn of the request that was served last, whichever is
later. So the requests of one tenant keep their order, and a tenant with a long queue delays another one by one request
of its own for each of the other's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from decoder_svc.scheduling.request import Request

# Most tokens that an answer counts for. Its length is not known when it is queued, and a large `max_tokens` says little
# about it.
_ANSWER_TOKENS = 256
# Tenants of one priority that are remembered, and whose turns are looked through.
_MAX_TENANTS = 4096
_MIN_TENANTS = 64


@dataclass(slots=True)
class _Level:
    """The turns of the requests with one priority."""

    num_live: int = 0
    # The latest turn of a request that was served.
    now: int = 0
    # By tenant, the end of its latest request.
    ends: dict[str, int] = field(default_factory=dict)
    # Number of tenants at which those whose turns are over are forgotten.
    num_too_many: int = _MIN_TENANTS

    def forget_some(self) -> None:
        """Forgets tenants whose turns are over, and all of them if there are very many with turns to come."""
        if len(self.ends) < self.num_too_many:
            return
        self.ends = {tenant: end for tenant, end in self.ends.items() if end > self.now}
        if len(self.ends) > _MAX_TENANTS:
            self.ends.clear()
        self.num_too_many = max(_MIN_TENANTS, 2 * len(self.ends))


class TenantTurns:
    """Gives requests their turns. Priorities have nothing to do with one another."""

    def __init__(self) -> None:
        # By priority; those with live requests only.
        self._levels: dict[int, _Level] = {}

    def add(self, request: Request) -> None:
        """Sets the turn of a request that has arrived."""
        level = self._levels.setdefault(request.priority, _Level())
        level.num_live += 1
        request.turn = max(level.now, level.ends.get(request.tenant, 0))
        answer = min(_ANSWER_TOKENS, request.params.max_tokens)
        level.ends[request.tenant] = request.turn + request.num_prompt_tokens + answer

    def serve(self, request: Request) -> None:
        """Notes that a request is served."""
        level = self._levels[request.priority]
        level.now = max(level.now, request.turn)

    def remove(self, request: Request) -> None:
        """Forgets a request that has ended."""
        level = self._levels[request.priority]
        level.num_live -= 1
        if level.num_live == 0:
            del self._levels[request.priority]
        else:
            level.forget_some()


def request_to_yield(running: Sequence[Request], head: Request, num_places: int) -> Request | None:
    """Returns the running request that should give its place to the head of the queue; None if none should.

    All places are taken. The head's tenant has less than an equal share of them, and another one more; its latest
    request yields, unless it has a higher priority.
    """
    places = Counter(request.tenant for request in running)
    share = num_places // (len(places) + (head.tenant not in places))
    if places[head.tenant] >= share:
        return None
    greedy = max(places, key=lambda tenant: places[tenant])
    latest = max((one for one in running if one.tenant == greedy), key=lambda one: one.serving_order)
    return latest if places[greedy] > max(share, 1) and latest.priority >= head.priority else None
