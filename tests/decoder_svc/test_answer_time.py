"""The expected time to an answer follows the queue, the size of the batch and the latest requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.answer_time import AnswerTimeEstimator
from decoder_svc.engine.figures import EngineLoad

IDLE = EngineLoad(0, 0, 0, 0.0, 0)


def test_before_the_first_answer_nothing_is_expected() -> None:
    assert AnswerTimeEstimator(1).expected_s(100, 100, IDLE, None, "") == 0


def test_each_batch_of_requests_ahead_adds_one_serving_time() -> None:
    estimator = AnswerTimeEstimator(4)
    estimator.note_served(2.0, 20, "")
    assert estimator.expected_s(3, 3, IDLE, None, "") == 0, "a place is free"
    # The new one and 3, 7 and 11 others: one, two and three batches.
    assert [estimator.expected_s(11, ahead, IDLE, None, "") for ahead in (3, 7, 11)] == pytest.approx([2.0, 4.0, 6.0])


def test_an_answer_without_a_token_counts_as_one_token() -> None:
    estimator = AnswerTimeEstimator(1)
    estimator.note_served(2.0, 0, "")
    assert estimator.expected_s(1, 0, IDLE, 1, "") == pytest.approx(2.0)


@given(
    served=st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 1000)), min_size=1, max_size=30),
    num_ahead=st.integers(0, 100),
    running=st.integers(0, 8),
    usage=st.floats(0, 1),
)
def test_more_requests_ahead_or_more_tokens_never_make_it_shorter(
    served: list[tuple[float, int]], num_ahead: int, running: int, usage: float
) -> None:
    estimator = AnswerTimeEstimator(8)
    for served_s, num_tokens in served:
        estimator.note_served(served_s, num_tokens, "")
    load = EngineLoad(running, 0, 0, usage, 0, 0.01)
    times = [estimator.expected_s(200, ahead, load, 10, "") for ahead in (num_ahead, num_ahead + 1)]
    assert 0 < times[0] <= times[1] <= estimator.expected_s(200, num_ahead + 1, load, 11, "") * 1.0001
    assert estimator.expected_s(200, num_ahead, load, None, "") >= times[0]


def test_a_request_takes_as_long_as_its_tenants_and_waits_at_the_pace_of_all() -> None:
    estimator = AnswerTimeEstimator(1)
    estimator.note_served(2.0, 20, "a")
    assert estimator.expected_s(1, 1, IDLE, None, "b") == pytest.approx(2.0), "nothing is known of its own answers"
    estimator.note_served(0.5, 5, "b")
    pace_s = 2.0 + 0.05 * (0.5 - 2.0)
    assert estimator.expected_s(1, 1, IDLE, None, "a") == pytest.approx(pace_s + 2.0)
    assert estimator.expected_s(1, 1, IDLE, None, "b") == pytest.approx(pace_s + 0.5)
    assert estimator.expected_s(1, 0, IDLE, 1, "b") == pytest.approx(0.1)


def test_the_tenants_whose_requests_ended_last_are_remembered() -> None:
    estimator = AnswerTimeEstimator(1)
    for number in range(3000):
        estimator.note_served(1.0, 10, f"tenant {number}")
        estimator.note_served(1.0, 10, "steady")
    assert len(estimator._tenants) <= 1024
    assert estimator.expected_s(1, 0, IDLE, None, "steady") == pytest.approx(1.0)
    assert estimator.expected_s(1, 0, IDLE, None, "tenant 0") == 0
