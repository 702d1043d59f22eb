"""The queue of requests that hold no KV blocks, with their cached prefixes and deadlines.

It keeps the order and answers questions; the scheduler decides which request to admit.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager, PrefixHit
from decoder_svc.scheduling.request import Request, RequestId


def enqueue(queue: list[Request], request: Request) -> None:
    """Inserts a request into a queue in serving order."""
    insort(queue, request, key=lambda other: other.serving_order)


class WaitingQueue:
    """Waiting requests in serving order. A preempted request returns to the place it had."""

    def __init__(self, kv_cache: KVCacheManager, clock: Callable[[], float]) -> None:
        """`clock` returns seconds on the same scale as `Request.deadline_s`."""
        self._kv_cache = kv_cache
        self._clock = clock
        self._requests: list[Request] = []
        # The prefix cache's version at the latest look-up, and its result.
        self._prefix_hits: dict[RequestId, tuple[int, PrefixHit]] = {}
        # The times at which the steps without an end began, in order, and the time of the latest end.
        self._step_began_s: deque[float] = deque()
        self._step_ended_s = -math.inf
        # Fastest pace of all steps so far; 0 before the first.
        self._best_s_per_token = 0.0
        self._was_late = False

    def __len__(self) -> int:
        """Returns the number of waiting requests."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Inserts a request at its place in the serving order."""
        enqueue(self._requests, request)

    def remove(self, request: Request) -> None:
        """Removes a request that was admitted or ended. Raises ValueError if it is not waiting."""
        self._requests.remove(request)
        self._prefix_hits.pop(request.request_id, None)

    def first(self, num_requests: int) -> list[Request]:
        """Returns at most `num_requests` requests from the head."""
        return list(islice(self._requests, num_requests))

    def bring_forward(
        self, num_places: Mapping[str, int], latest_turn: int, on_change: Callable[[Request], None]
    ) -> list[Request]:
        """Moves requests of some tenants before those of all others, and returns them in serving order.

        Only those with the priority of the head move; the order within a tenant stays.

        Args:
            num_places: By tenant, how many of its requests move.
            latest_turn: Requests with later turns stay.
            on_change: Is called with each request that moves, before its turn changes.
        """
        priority = self._requests[0].priority
        left = dict(num_places)
        chosen: list[Request] = []
        first_other: Request | None = None
        for request in self._requests:
            if not left or request.priority != priority or request.turn > latest_turn:
                break
            if request.tenant not in left:
                first_other = first_other or request
                continue
            chosen.append(request)
            left[request.tenant] -= 1
            if left[request.tenant] == 0:
                del left[request.tenant]
        if first_other is not None:
            for request in chosen:
                if request.turn >= first_other.turn:
                    on_change(request)
                    self._requests.remove(request)
                    request.turn = first_other.turn - 1
                    enqueue(self._requests, request)
        return sorted(chosen, key=lambda request: request.serving_order)

    def is_head(self, request: Request) -> bool:
        """Whether this request is served next."""
        return self._requests[0] is request

    def prefix_hit(self, request: Request, *, may_be_old: bool) -> PrefixHit:
        """Returns the cached prefix of a waiting request, looked up again only if the prefix cache has changed.

        With `may_be_old` an earlier result is returned even if the cache has changed since.
        """
        version = self._kv_cache.version
        known = self._prefix_hits.get(request.request_id)
        if known is None or (known[0] != version and not may_be_old):
            known = self._prefix_hits[request.request_id] = (version, self._kv_cache.find_prefix(request))
        return known[1]

    def must_miss_deadline(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request cannot get its first token before its deadline.

        The estimate uses the fastest pace of any step so far, so a request that could still succeed is kept.
        """
        if request.deadline_s is None:
            return False
        least_s = (request.num_tokens - hit.num_tokens) * self._best_s_per_token
        return request.deadline_s <= self._clock() + least_s

    def begin_step(self) -> None:
        """Notes when a step begins; `end_step` measures its pace."""
        self._step_began_s.append(self._clock())

    def end_step(self, num_tokens: int, *, is_late: bool = False) -> None:
        """Ends the oldest step, in which `num_tokens` tokens were computed.

        A step that began before the end of the one before it counts from that end. With `is_late` the result was read
        behind the next step on the device, so the time of that step is unknown.
        """
        began_s = max(self._step_began_s.popleft(), self._step_ended_s)
        self._step_ended_s = self._clock()
        if num_tokens and not self._was_late:
            s_per_token = (self._step_ended_s - began_s) / num_tokens
            self._best_s_per_token = min(self._best_s_per_token or s_per_token, s_per_token)
        self._was_late = is_late

    def fail_steps(self) -> None:
        """Ends all steps without a measurement."""
        self._step_began_s.clear()
        self._was_late = False
