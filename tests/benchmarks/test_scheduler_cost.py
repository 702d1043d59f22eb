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


def test_the_prefix_cache_is_measured_with_prompts_that_repeat_nothing() -> None:
    bookkeeping = scheduler_cost.measure_bookkeeping(num_rounds=2, num_requests=3, num_output_tokens=4)
    assert len(bookkeeping.with_prefix_cache_us) == len(bookkeeping.without_us) == 2
    assert min(bookkeeping.with_prefix_cache_us + bookkeeping.without_us) > 0
