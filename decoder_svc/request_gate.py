"""The gate that every generate request passes: it takes the request's id and its place, and gives both back.

A request is refused on arrival, before any work is done for it, when its id is in use, when too many requests are live,
or when its answer would come after its deadline. A late answer costs as much as one in time, and a queue longer than
the deadlines allow makes all answers late. Where the server sets no default deadline, a request without one waits,
however long. The gate also bounds the images of all requests in progress, charges the tenant's quota and counts what
was served. Limits that hold for all RPCs are in lookonce/server/admission/call_gate.py.

Event loop only.
"""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from decoder_svc.answer_time import AnswerTimeEstimator
from decoder_svc.engine.figures import EngineLoad
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import RequestUsage
from lookonce.errors import InvalidParameterError, OverloadedError
from lookonce.identity import REQUEST_ID, REQUEST_ID_RULE, Identity
from lookonce.server.admission.image_shares import ImageShares
from lookonce.server.admission.quotas import Quotas, Resource

# Largest part of the time to the deadline that an answer may be expected to take. Half of all answers take longer than
# expected.
_SAFE_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Arrival:
    """A generate request as it arrives, before its prompt has been looked at."""

    identity: Identity
    # The id from `RequestGate.request_id_for`.
    request_id: str
    # Lower runs earlier.
    priority: int = 0
    # Length limit of an answer, tokens; None: the request states none.
    max_tokens: int | None = None
    # Time to the deadline, the caller's or the server's default, seconds; None: no deadline.
    remaining_s: float | None = None
    # The number of answers, each of which takes a place.
    num_choices: int = 1
    # The field of the request that says so.
    choices_field: str = "sampling.n"


@dataclass(slots=True, eq=False)
class Ticket:
    """The place of one request among the live ones."""

    # The id that the caller knows. A request of another tenant may have the same one.
    request_id: RequestId
    # The id in the engine. It is never used twice, so that the caller may reuse its id as soon as it has its answer.
    engine_id: RequestId
    identity: Identity
    priority: int
    num_choices: int = 1
    # Set by AbortRequest. It matters until the request reaches the engine, which is asked to abort from then on.
    is_aborted: bool = False
    # The outputs of its answers, set when it is submitted to the engine.
    streams: tuple[OutputStream, ...] = ()
    # Given back with the place.
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def engine_ids(self) -> list[RequestId]:
        """The ids of its answers in the engine."""
        return [RequestId(f"{self.engine_id}.{index}") for index in range(self.num_choices)]

    @property
    def num_live(self) -> int:
        """The answers with which the engine is not done. A closed stream has a slow reader only."""
        return sum(not stream.is_closed for stream in self.streams) if self.streams else self.num_choices


class RequestGate:
    """All live requests of the decoder, from arrival until the answer has been read."""

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        is_healthy: Callable[[], bool],
        quotas: Quotas,
        metrics: DecoderMetrics,
        shares: ImageShares,
        *,
        max_running_requests: int,
        max_live_requests: int,
    ) -> None:
        """`load` returns the engine's current load, and `is_healthy` whether it accepts requests.

        More than `max_live_requests` requests are refused. `shares` bounds their images.
        """
        self._load = load
        self._is_healthy = is_healthy
        self._quotas = quotas
        self._metrics = metrics
        self._shares = shares
        self._max_running = max_running_requests
        self._max_live = max_live_requests
        self._answer_time = AnswerTimeEstimator(max_running_requests)
        # By tenant and request id: no tenant sees, hinders or ends the requests of another one.
        self._tickets: dict[tuple[str, str], Ticket] = {}
        self._num_admitted = itertools.count()

    def request_id_for(self, identity: Identity, chosen_id: str, call_id: str | None) -> str:
        """Returns the id for a request that arrives now: the chosen one, else the call's if it is free, else a new one.

        A caller may send one id with all calls of a session, so a call's id that is in use is no fault. Raises
        InvalidParameterError for a malformed `chosen_id`; empty: none is chosen.
        """
        if chosen_id:
            if not REQUEST_ID.fullmatch(chosen_id):
                raise InvalidParameterError("request_id", REQUEST_ID_RULE)
            return chosen_id
        if call_id is None or (identity.tenant, call_id) in self._tickets:
            return uuid.uuid4().hex
        return call_id

    @contextmanager
    def admitted(self, arrival: Arrival) -> Iterator[Ticket]:
        """Admits a request for the duration of the block.

        Raises InvalidParameterError for an id that is in use by the tenant, and OverloadedError when too many requests
        are live or the answer would come too late.
        """
        request_id = arrival.request_id
        key = arrival.identity.tenant, request_id
        if key in self._tickets:
            raise InvalidParameterError("request_id", "a request with this id is being served; choose another")
        self._check_share(arrival.identity, arrival.num_choices)
        self._check_place(arrival.num_choices)
        self._check_deadline(arrival)
        engine_id = RequestId(f"{request_id}#{next(self._num_admitted)}")
        ticket = self._tickets[key] = Ticket(
            RequestId(request_id), engine_id, arrival.identity, arrival.priority, arrival.num_choices
        )
        try:
            # Each answer counts as a call.
            others = self._quotas.more_in_flight(arrival.identity, arrival.num_choices - 1, arrival.choices_field)
            with others, ticket.held:
                yield ticket
        finally:
            del self._tickets[key]

    def abort(self, request_id: str, tenant: str | None) -> list[Ticket]:
        """Marks the tenant's request as aborted and returns its ticket, if there is one.

        With `tenant` None, marks the requests of all tenants that have this id.
        """
        if tenant is None:
            found = [ticket for ticket in self._tickets.values() if ticket.request_id == request_id]
        else:
            found = [ticket for ticket in (self._tickets.get((tenant, request_id)),) if ticket is not None]
        for ticket in found:
            ticket.is_aborted = True
        return found

    @contextmanager
    def images_in_progress(self, identity: Identity, num_bytes: int) -> Iterator[None]:
        """Counts image files of `num_bytes` as the tenant's while the block runs, and charges its quota for them.

        Raises OverloadedError if the files of the tenant's requests in progress have too many bytes.
        """
        # Images that a request names by their digest take no memory, and requests are limited themselves.
        with self._shares.taken(identity.tenant, 0, num_bytes):
            self._quotas.charge(identity, Resource.IMAGE_BYTES, num_bytes)
            yield

    def charge_pixels(self, identity: Identity, num_pixels: int) -> None:
        """Charges the tenant's quota for the pixels of these images, which their headers claim."""
        self._quotas.charge(identity, Resource.IMAGE_PIXELS, num_pixels)

    def account(self, ticket: Ticket, usage: RequestUsage) -> None:
        """Charges the tokens of a request that ends to its tenant's quota, and counts the request in the metrics."""
        self._quotas.charge(ticket.identity, Resource.TOKENS, usage.prompt_tokens + usage.completion_tokens)
        self._metrics.observe(usage)

    def note_served(self, served_s: float, num_tokens: int, tenant: str) -> None:
        """Takes a complete answer of `num_tokens` tokens into the estimate; `served_s` is from first step to end."""
        self._answer_time.note_served(served_s, num_tokens, tenant)

    def expected_s(self, priority: int, max_tokens: int | None, tenant: str = "") -> float:
        """Returns the seconds until an answer that is asked for now is complete; 0 while it need not wait to run."""
        # This runs for every arrival: 38 µs for 100 requests of 10 tenants (Xeon, 2026-11-29); a refusal takes 750 µs.
        groups: dict[tuple[int, str], int] = {}
        for ticket in self._tickets.values():
            group = ticket.priority, ticket.identity.tenant
            groups[group] = groups.get(group, 0) + ticket.num_live
        # Live requests by tenant: all, those that may be served before this one, and those that may yield to it.
        live: Counter[str] = Counter()
        before: Counter[str] = Counter()
        may_yield: Counter[str] = Counter()
        for (other_priority, other), number in groups.items():
            live[other] += number
            if other_priority <= priority:
                before[other] += number
            if other_priority >= priority:
                may_yield[other] += number
        num_live = live.total()
        load = self._load()
        num_own = before[tenant]
        # Tenants take turns.
        in_turn = num_own + sum(min(number, num_own + 1) for other, number in before.items() if other != tenant)
        num_ahead = max(in_turn, min(load.running_requests, before.total()))
        # A tenant with less than an equal share is given a place by one that has more (tenant_shares.py).
        share = max(1, self._answer_time.num_places(load) // len({tenant, *live}))
        if live[tenant] < share < max((may_yield[other] for other in live if other != tenant), default=0):
            num_ahead = min(num_ahead, num_live - may_yield.total() + num_own)
        return self._answer_time.expected_s(num_live, num_ahead, load, max_tokens, tenant)

    def _check_share(self, identity: Identity, num_choices: int) -> None:
        """Raises OverloadedError if a tenant would have more requests than would be free for all others.

        These are the dynamic thresholds of lookonce/server/admission/image_shares.py: one tenant alone gets half of all
        places. Callers without tokens are one tenant, and may have all.
        """
        if not identity.is_authenticated:
            return
        num_live = num_own = 0
        for ticket in self._tickets.values():
            num_live += ticket.num_choices
            num_own += ticket.num_choices if ticket.identity.tenant == identity.tenant else 0
        num_free = self._max_live - num_live
        if num_own + num_choices > max(1, num_free - num_choices):
            raise OverloadedError(
                f"{num_own} of your requests are being served, {num_choices} more are asked for, and {num_free} places "
                "are free for all tenants; come back later"
            )

    def _check_place(self, num_choices: int) -> None:
        num_live = sum(ticket.num_choices for ticket in self._tickets.values())
        # The engine may still hold requests whose callers have gone, until its next step. They count beside those that
        # are being prepared, so that the engine never holds more than the limit. An engine that hangs refuses requests
        # itself, with UnavailableError: their callers should try another replica.
        if self._is_healthy():
            num_preparing = sum(ticket.num_choices for ticket in self._tickets.values() if not ticket.streams)
            num_live = max(num_live, num_preparing + self._load().live_requests)
        if num_live + num_choices > self._max_live:
            raise OverloadedError(
                f"{num_live} requests are being served, the limit is {self._max_live}; come back later"
            )

    def _check_deadline(self, arrival: Arrival) -> None:
        if arrival.remaining_s is None:
            return
        expected_s = self.expected_s(arrival.priority, arrival.max_tokens, arrival.identity.tenant)
        if expected_s > _SAFE_SHARE * arrival.remaining_s:
            raise OverloadedError(
                f"the answer would take about {expected_s:.1f} s, and the deadline is in {arrival.remaining_s:.1f} s",
                retry_after_s=expected_s - _SAFE_SHARE * arrival.remaining_s,
            )
