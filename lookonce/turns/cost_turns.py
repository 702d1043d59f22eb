"""The order in which waiting work is begun: tenants share the workers by the cost of what they ask for.

The owner of the queue says what one item costs, in a unit of its own: pixels to decode, or characters to tokenize. It
must know the cost in advance. One rule orders the tenants, and then the ranges of costs of the chosen tenant's items:

    Each member has a count of the cost of its items that were begun. Next is the member whose count will be lowest
    after its next item; of several, the one served longest ago, where one that was away may count as never served. A
    member that begins to wait gets at least the lowest count of those that wait already, so that it saves up nothing
    while it is away.

The members of the second level are ranges of costs, a factor of four wide. A tenant's small items thus share with its
giants and do not queue behind them, and a giant waits for a bounded cost of small items. Within a range, calls take
turns, and each call's items go in the order of asking (fair_queue.py): equal items leave in the order in which they
came.

While a member waits, each other member gets at most twice the largest cost between two of its turns. The counts are
those of the Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). Fair queueing
compares ends instead of beginnings (Demers, Keshav and Shenker, SIGCOMM 1989), which lets a small item go first.

No thread, no clock; not safe for threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lookonce.turns.fair_queue import CallerId, FairQueue

# Bits of the ratio between the largest and the smallest cost of a range.
_RANGE_BITS = 2

KeyT = TypeVar("KeyT", bound=Hashable)
LineT = TypeVar("LineT")
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One item that waits for its turn, as far as the turn depends on it."""

    caller: CallerId
    # Position among all items ever asked for; no two items that wait have the same one.
    number: int
    # At least 1, in the owner's unit.
    cost: int

    @property
    def tenant(self) -> str:
        """The tenant whose cost is counted."""
        return self.caller.tenant

    @property
    def cost_range(self) -> int:
        """The range of costs that the item belongs to."""
        return (self.cost - 1).bit_length() // _RANGE_BITS


class CostTurns(Generic[ItemT]):
    """Waiting items by tenant, range of costs and caller."""

    def __init__(self) -> None:
        self._tenants: _Members[str, _Members[int, FairQueue[tuple[TurnRequest, ItemT]]]] = _Members(
            lambda: _Members(FairQueue)
        )
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def put(self, request: TurnRequest, item: ItemT) -> None:
        """Adds an item that waits."""
        queue = self._tenants.line(request.tenant).line(request.cost_range)
        queue.put(request.caller, request.number, (request, item))
        self._num_items += 1
        self._note_next(request)

    def take(self) -> ItemT:
        """Removes and returns the item whose turn it is, and counts its cost. There must be one."""
        ranges = self._tenants.line(self._tenants.first())
        queue = ranges.line(ranges.first())
        request, item = queue.take(queue.next_caller())
        self._num_items -= 1
        ranges.count(request.cost_range, request.cost)
        self._tenants.count(request.tenant, request.cost)
        self._note_next(request)
        return item

    def discard(self, request: TurnRequest) -> None:
        """Removes an item if it still waits. Its cost does not count."""
        queue = self._tenants.line(request.tenant).line(request.cost_range)
        num_before = len(queue)
        queue.discard(request.caller, request.number)
        self._num_items -= num_before - len(queue)
        self._note_next(request)

    def _note_next(self, request: TurnRequest) -> None:
        """Updates the next item of the request's range and tenant."""
        ranges = self._tenants.line(request.tenant)
        queue = ranges.line(request.cost_range)
        waiting = next(queue.waiting(queue.next_caller())) if queue else None
        ranges.set_next(request.cost_range, None if waiting is None else waiting[0].cost)
        self._tenants.set_next(request.tenant, ranges.next_cost)


@dataclass(slots=True, eq=False)
class _Member(Generic[LineT]):
    line: LineT
    # Cost of what was begun, or the lowest count of the others at the time it began to wait.
    count: int = 0
    # Number of the turn in which it was last served.
    last_turn: int = 0
    # Cost of its next item; None: nothing waits.
    next_cost: int | None = None


class _Members(Generic[KeyT, LineT]):
    """One level of the rule: the members and their counts, each with a line of whatever waits."""

    def __init__(self, new_line: Callable[[], LineT]) -> None:
        self._new_line = new_line
        # Those that wait, and those that have left with more than the lowest count of those that wait.
        self._members: dict[KeyT, _Member[LineT]] = {}
        self._num_turns = 0

    @property
    def next_cost(self) -> int | None:
        """Cost of the item whose turn it is; None: nothing waits."""
        is_waiting = any(member.next_cost is not None for member in self._members.values())
        return self._members[self.first()].next_cost if is_waiting else None

    def line(self, key: KeyT) -> LineT:
        """The member's line; a new one for a new member."""
        if key not in self._members:
            self._members[key] = _Member(self._new_line())
        return self._members[key].line

    def first(self) -> KeyT:
        """The member whose turn it is. At least one must be waiting."""
        ends = {
            key: (member.count + member.next_cost, member.last_turn)
            for key, member in self._members.items()
            if member.next_cost is not None
        }
        return min(ends, key=lambda key: ends[key])

    def count(self, key: KeyT, cost: int) -> None:
        """Counts an item that the member's line has given."""
        self._num_turns += 1
        self._members[key].count += cost
        self._members[key].last_turn = self._num_turns

    def set_next(self, key: KeyT, cost: int | None) -> None:
        """Notes the cost of the member's next item; None: nothing of it waits."""
        member, lowest = self._members[key], self._lowest_count()
        if member.next_cost is None and cost is not None and lowest is not None:
            member.count = max(member.count, lowest)
        member.next_cost = cost
        if cost is None:
            self._forget()

    def _lowest_count(self) -> int | None:
        return min((member.count for member in self._members.values() if member.next_cost is not None), default=None)

    def _forget(self) -> None:
        """Forgets members that would begin anew with no lower count; all when nothing waits."""
        lowest = self._lowest_count()
        self._members = {
            key: member
            for key, member in self._members.items()
            if member.next_cost is not None or (lowest is not None and member.count > lowest)
        }
