"""Constraints of several tenants are compiled in turns."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator

import pytest

from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.engine.constraint_desk import ConstraintDesk
from decoder_svc.engine.messages import Compiled
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from lookonce.errors import InvalidParameterError
from tests.decoder_svc.constraint.demo_constraints import DEMO_VOCAB, demo_vocabulary
from tests.decoder_svc.scheduling import simulation

TIMEOUT_S = 30


class RefusingFollower(AnswerFollower):
    """Refuses every constraint, but none before it is told to."""

    def __init__(self) -> None:
        super().__init__(demo_vocabulary, DEMO_VOCAB)
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def prepare(self, constraint: Constraint) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        raise InvalidParameterError("sampling.regex", constraint.text)


@pytest.fixture
def follower() -> RefusingFollower:
    return RefusingFollower()


@pytest.fixture
def desk(follower: RefusingFollower) -> Iterator[ConstraintDesk]:
    made = ConstraintDesk(follower)
    yield made
    follower.may_go_on.set()
    made.close()


def constrained(name: str, length: int) -> Request:
    made = simulation.request(name, 4, tenant=name[0])
    constraint = Constraint(ConstraintKind.REGEX, "x" * length)
    made.params = dataclasses.replace(made.params, constraint=constraint)
    return made


def order(done: queue.Queue[Compiled], number: int) -> list[str]:
    return [done.get(timeout=TIMEOUT_S).request_id for _ in range(number)]


def test_a_tenant_with_many_constraints_delays_another_one_by_few(
    desk: ConstraintDesk, follower: RefusingFollower
) -> None:
    done: queue.Queue[Compiled] = queue.Queue()
    for number in range(20):
        desk.begin(constrained(f"a{number}", 100), done.put)
    assert follower.has_begun.wait(TIMEOUT_S)
    for number in range(2):
        desk.begin(constrained(f"b{number}", 100), done.put)
    follower.may_go_on.set()
    found = order(done, 22)
    assert found.index("b0") <= 2
    assert found.index("b1") <= 4
    assert [name for name in found if name[0] == "a"] == [f"a{number}" for number in range(20)]


def test_a_request_that_is_given_up_is_not_compiled(desk: ConstraintDesk, follower: RefusingFollower) -> None:
    done: queue.Queue[Compiled] = queue.Queue()
    requests = [constrained(f"a{number}", 10) for number in range(6)]
    for one in requests:
        desk.begin(one, done.put)
    assert follower.has_begun.wait(TIMEOUT_S)
    for one in requests[1:4]:
        assert desk.give_up(one.request_id) is one
        assert desk.give_up(one.request_id) is None
    follower.may_go_on.set()
    assert order(done, 3) == ["a0", "a4", "a5"]
    desk.begin(constrained("b0", 10), done.put)
    assert order(done, 1) == ["b0"]
    assert done.empty()
