from __future__ import annotations

from benchmarks import scheduler_cost


def test_a_long_prompt_is_hashed_once() -> None:
    hashing = scheduler_cost.measure_hashing(num_calls=5)
    assert hashing.num_hashed == hashing.num_blocks == 2048


def test_every_queue_length_is_measured_beside_an_empty_queue() -> None:
    costs = scheduler_cost.measure(num_running=2, num_rounds=3, num_steps=2)
    assert [cost.num_waiting for cost in costs] == [0, 100, 1000, 10_000]
    assert costs[0].ratio == [1.0] * 3
    assert all(len(cost.step_us) == 3 and min(cost.step_us) > 0 for cost in costs)
