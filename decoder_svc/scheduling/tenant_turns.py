"""Tenants take turns: a request's place in the queue depends on what its tenant has asked for lately.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each request gets a number, its turn, when it arrives. It is
where the tenant's request before it ends, in tokens, or the turn of the request that was served last, whichever is
later. So the requests of one tenant keep their order, and a tenant with a long queue delays another one by one request
of its own for each of the other's. How long an answer becomes is known when it ends: the tenant's later requests get
the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decoder_svc.scheduling.request import Request

# Most tokens that an answer counts for until it ends. A large `max_tokens` says little about its length.
_ANSWER_TOKENS = 256
# Tenants of one priority that are remembered, and whose turns are looked through.
_MAX_TENANTS = 4096
_MIN_TENANTS = 64


def expected_tokens(request: Request) -> int:
    """Returns what a request counts for until it ends: its prompt's tokens, and at most 256 of its answer's."""
    return request.num_prompt_tokens + min(_ANSWER_TOKENS, request.params.max_tokens)


@dataclass(slots=True)
class _TenantTurn:
    """The latest request of one tenant at one priority."""

    # The turn of its latest request, before which no later one may come.
    latest: int
    # The place where that request ends, tokens.
    end: int
    # Tokens that its ended requests took beyond what was expected of them; less than 0 if they took fewer.
    surplus: int = 0
    # The latest turn of one that was served, and that number when the turn was given, which does not know of more.
    served: int = 0
    served_surplus: int = 0


@dataclass(slots=True)
class _Level:
    """The turns of the requests with one priority."""

    num_live: int = 0
    # The latest turn of a request that was served.
    now: int = 0
    tenants: dict[str, _TenantTurn] = field(default_factory=dict)
    # Number of tenants at which those whose turns are over are forgotten.
    num_too_many: int = _MIN_TENANTS

    def forget_some(self) -> None:
        """Forgets tenants whose turns are over, and all of them if there are very many with turns to come."""
        if len(self.tenants) < self.num_too_many:
            return
        self.tenants = {name: one for name, one in self.tenants.items() if max(one.latest, one.end) > self.now}
        if len(self.tenants) > _MAX_TENANTS:
            self.tenants.clear()
        self.num_too_many = max(_MIN_TENANTS, 2 * len(self.tenants))


class TenantTurns:
    """Gives requests their turns. Priorities have nothing to do with one another."""

    def __init__(self) -> None:
        # By priority; those with live requests only.
        self._levels: dict[int, _Level] = {}

    def add(self, request: Request) -> None:
        """Sets the turn of a request that has arrived."""
        level = self._levels.setdefault(request.priority, _Level())
        level.num_live += 1
        request.turn = level.now
        if (tenant := level.tenants.get(request.tenant)) is not None:
            request.turn = max(level.now, tenant.end, tenant.latest)
        end = request.turn + expected_tokens(request)
        if tenant is None:
            level.tenants[request.tenant] = _TenantTurn(request.turn, end)
        else:
            tenant.latest, tenant.end = request.turn, end
            request.surplus_before = tenant.surplus

    def serve(self, request: Request) -> None:
        """Notes that a request is served."""
        level = self._levels[request.priority]
        level.now = max(level.now, request.turn)
        tenant = level.tenants.get(request.tenant)
        if tenant is not None and request.turn >= tenant.served:
            tenant.served, tenant.served_surplus = request.turn, request.surplus_before

    def now(self, priority: int) -> int:
        """Returns the latest turn that was served at a priority with live requests."""
        return self._levels[priority].now

    def unseen_surplus(self, tenant: str, priority: int) -> int:
        """Returns the tokens by which a tenant's turns are too early, because its answers became longer than expected.

        Turns that were given stay; the later ones are right.
        """
        found = self._levels[priority].tenants.get(tenant)
        return 0 if found is None else max(0, found.surplus - found.served_surplus)

    def remove(self, request: Request, *, was_served: bool) -> None:
        """Forgets a request that has ended, and counts for its tenant what it really took."""
        level = self._levels[request.priority]
        level.num_live -= 1
        if level.num_live == 0:
            del self._levels[request.priority]
            return
        if (tenant := level.tenants.get(request.tenant)) is not None:
            num_tokens = request.num_prompt_tokens + request.num_output_tokens if was_served else 0
            surplus = num_tokens - expected_tokens(request)
            tenant.end += surplus
            tenant.surplus += surplus
        level.forget_some()
