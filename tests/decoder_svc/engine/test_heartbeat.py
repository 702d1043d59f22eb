"""The heartbeat tells a thread that hangs from one that waits for work."""

from __future__ import annotations

import pytest

from decoder_svc.engine.heartbeat import Heartbeat


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_round_that_takes_too_long_is_not_fresh_until_it_ends() -> None:
    clock = Clock()
    heartbeat = Heartbeat(2.0, clock=clock)
    heartbeat.begin_round()
    states: list[bool] = []
    for passed_s in (2.0, 0.1):
        clock.now_s += passed_s
        states.append(heartbeat.is_fresh)
    assert heartbeat.round_s == pytest.approx(2.1)
    heartbeat.begin_round()
    states.append(heartbeat.is_fresh)
    assert states == [True, False, True]


def test_a_thread_may_rest_as_long_as_it_likes() -> None:
    clock = Clock()
    heartbeat = Heartbeat(2.0, clock=clock)
    clock.now_s += 1000
    assert (heartbeat.is_fresh, heartbeat.round_s) == (True, 0), "it has not begun"
    heartbeat.begin_round()
    heartbeat.rest()
    clock.now_s += 1000
    assert (heartbeat.is_fresh, heartbeat.round_s) == (True, 0)
