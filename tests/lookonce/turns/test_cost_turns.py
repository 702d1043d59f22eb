"""Tenants share workers by cost, and so do ranges of costs. Whoever waits is passed by a bounded cost."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lookonce.turns.cost_turns import CostTurns, TurnRequest
from lookonce.turns.fair_queue import CallerId

GIANT, SMALL = 49_000_000, 1 << 18
Turns = CostTurns[TurnRequest]
Waiting = list[TurnRequest]


def line(tenant: str, num_items: int, cost: int, *, start: int = 0, one_call: bool = False) -> Waiting:
    """Items of one tenant, each in a call of its own unless `one_call`."""
    return [
        TurnRequest(CallerId(tenant, str(start if one_call else number)), number, cost)
        for number in range(start, start + num_items)
    ]


def put(turns: Turns, *requests: TurnRequest) -> None:
    for request in requests:
        turns.put(request, request)


def taken(turns: Turns) -> Waiting:
    """Everything in the order of its turns."""
    return [turns.take() for _ in range(len(turns))]


def test_another_tenant_s_small_item_is_next_after_any_number_of_giants() -> None:
    turns: Turns = CostTurns()
    put(turns, *line("a", 40, GIANT))
    begun = [turns.take().tenant for _ in range(2)]
    for number in range(100, 110):
        put(turns, *line("b", 1, SMALL, start=number))
        begun.append(turns.take().tenant)
        begun.append(turns.take().tenant)
    assert begun == ["a", "a"] + ["b", "a"] * 10


def test_of_tenants_with_equal_items_the_new_one_is_next() -> None:
    turns: Turns = CostTurns()
    put(turns, *line("a", 4, GIANT))
    assert turns.take().tenant == "a"
    put(turns, *line("b", 2, GIANT, start=10))
    assert [request.tenant for request in taken(turns)] == ["b", "a", "b", "a", "a"]


def test_a_tenant_that_comes_late_has_saved_up_nothing() -> None:
    turns: Turns = CostTurns()
    put(turns, *line("a", 10, GIANT))
    for _ in range(5):
        turns.take()
    put(turns, *line("b", 5, GIANT, start=20))
    assert [request.tenant for request in taken(turns)] == ["b", "a"] * 5


def test_a_tenant_with_many_small_items_and_one_with_giants_get_equal_cost() -> None:
    turns: Turns = CostTurns()
    num_small = GIANT // SMALL
    put(turns, *line("a", 4, GIANT), *line("b", 3 * num_small, SMALL, start=10))
    order = [request.tenant for request in taken(turns)]
    giants = [index for index, tenant in enumerate(order) if tenant == "a"]
    gaps = [later - earlier - 1 for earlier, later in itertools.pairwise(giants[:3])]
    assert all(abs(gap - num_small) <= 1 for gap in gaps), gaps


def test_a_tenant_s_small_item_does_not_queue_behind_its_giants() -> None:
    turns: Turns = CostTurns()
    put(turns, *line("a", 40, GIANT))
    turns.take()
    put(turns, *line("a", 1, SMALL, start=50))
    assert turns.take().number == 50


def test_a_giant_waits_for_its_own_cost_in_smaller_items_and_no_longer() -> None:
    turns: Turns = CostTurns()
    put(turns, *line("a", 1, GIANT))
    for number in range(1, 1000):
        put(turns, *line("a", 1, SMALL, start=number))
        if turns.take().cost == GIANT:
            break
    assert number == GIANT // SMALL + 1


def test_equal_items_of_a_tenant_leave_as_they_came_and_calls_with_many_take_turns() -> None:
    turns: Turns = CostTurns()
    put(turns, *line("a", 5, GIANT))
    assert [request.number for request in taken(turns)] == [0, 1, 2, 3, 4]
    put(turns, *line("a", 3, GIANT, start=10, one_call=True), *line("a", 2, GIANT, start=20, one_call=True))
    assert [request.number for request in taken(turns)] == [10, 20, 11, 21, 12]


def test_an_item_that_leaves_costs_its_tenant_nothing_and_leaves_nothing_behind() -> None:
    turns: Turns = CostTurns()
    giants = line("a", 3, GIANT)
    put(turns, *giants, *line("b", 1, GIANT, start=10))
    for request in (*giants[:2], giants[0], *line("c", 1, SMALL, start=99)):
        turns.discard(request)
    assert [request.number for request in taken(turns)] == [2, 10]
    assert not turns._tenants._members


class Model:
    """The rule, written down without regard to speed, for tenants with one call each."""

    def __init__(self) -> None:
        self.waiting: Waiting = []
        self._tenants: dict[str, int] = {}
        self._ranges: dict[str, dict[int, int]] = defaultdict(dict)

    def put(self, request: TurnRequest) -> None:
        self._join(self._tenants, request.tenant, {one.tenant for one in self.waiting})
        ranges = {one.cost_range for one in self.waiting if one.tenant == request.tenant}
        self._join(self._ranges[request.tenant], request.cost_range, ranges)
        self.waiting.append(request)

    def _join(self, counts: dict[Any, int], member: Hashable, waiting: Collection[Hashable]) -> None:
        if not waiting:
            counts.clear()
        if member not in waiting:
            counts[member] = max(counts.get(member, 0), min((counts[one] for one in waiting), default=0))

    def take(self, request: TurnRequest) -> None:
        """Checks that it is the turn of this item's tenant and range, and counts the item."""
        nexts = {tenant: self._nexts_of(tenant) for tenant in {one.tenant for one in self.waiting}}
        assert request in nexts[request.tenant]
        # Ranges with equal ends give a tenant several next items.
        ends = [max(self._tenants[tenant] + one.cost for one in items) for tenant, items in nexts.items()]
        assert self._tenants[request.tenant] + request.cost <= min(ends)
        self.waiting.remove(request)
        self._tenants[request.tenant] += request.cost
        self._ranges[request.tenant][request.cost_range] += request.cost

    def _nexts_of(self, tenant: str) -> Waiting:
        """The first items of those ranges whose ends are lowest."""
        firsts = {one.cost_range: one for one in reversed(self.waiting) if one.tenant == tenant}
        ends = {key: self._ranges[tenant][key] + one.cost for key, one in firsts.items()}
        return [one for key, one in firsts.items() if ends[key] == min(ends.values())]


class Passed:
    """Cost of what others got since each waiting member's last turn, or since it began to wait."""

    def __init__(self) -> None:
        self._costs: dict[Hashable, dict[Hashable, int]] = {}
        self._largest = 0

    def wait(self, member: Hashable, cost: int) -> None:
        self._largest = max(self._largest, cost)
        self._costs.setdefault(member, defaultdict(int))

    def turn(self, member: Hashable, cost: int, waiting: Collection[Hashable]) -> None:
        self._costs[member].clear()
        for one in list(self._costs):
            if one not in waiting:
                del self._costs[one]
            elif one != member:
                self._costs[one][member] += cost
                assert self._costs[one][member] <= 2 * self._largest


ITEMS = st.tuples(st.sampled_from("abcd"), st.sampled_from([1, SMALL, 600_000, 2_000_000, 12_000_000, GIANT]))


@given(st.lists(ITEMS | st.just("take"), min_size=20, max_size=120))
def test_the_order_is_the_rule_s_and_no_member_starves(steps: list[tuple[str, int] | str]) -> None:
    turns: Turns = CostTurns()
    model, tenants = Model(), Passed()
    ranges: dict[str, Passed] = defaultdict(Passed)
    numbers = itertools.count()

    def take() -> None:
        request = turns.take()
        model.take(request)
        tenants.turn(request.tenant, request.cost, {one.tenant for one in model.waiting})
        of_tenant = {one.cost_range for one in model.waiting if one.tenant == request.tenant}
        ranges[request.tenant].turn(request.cost_range, request.cost, of_tenant)

    for step in steps:
        if isinstance(step, tuple):
            tenant, cost = step
            request = TurnRequest(CallerId(tenant, "call"), next(numbers), cost)
            put(turns, request)
            model.put(request)
            tenants.wait(tenant, request.cost)
            ranges[tenant].wait(request.cost_range, request.cost)
        elif model.waiting:
            take()
    while model.waiting:
        take()
    assert not turns
