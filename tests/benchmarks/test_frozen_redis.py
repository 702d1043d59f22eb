"""The benchmark's figures follow from those of its phases. test_quick.py runs it."""

from __future__ import annotations

import pytest

from benchmarks.frozen_redis import Load, Phase, Round, quantile, section

NORMAL = Phase(100, 0.010, 0.020, 0.030, 8, 8, 8, 0.2)
FROZEN = Phase(100, 0.010, 0.021, 0.040, 8, 7, 9, 0.6)


@pytest.mark.parametrize(
    ("num_values", "share", "expected"),
    [(1, 0.99, 1), (100, 0.99, 99), (101, 0.99, 100), (10, 0.5, 5), (200, 0.99, 198)],
)
def test_a_quantile_is_one_of_the_values(num_values: int, share: float, expected: int) -> None:
    assert quantile(range(num_values, 0, -1), share) == expected


def test_the_ratio_is_that_of_the_99th_percentiles() -> None:
    assert Round(NORMAL, FROZEN).ratio == pytest.approx(1.05)


def test_the_section_tells_ratio_spread_and_right_answers() -> None:
    text = section(Load(8, 0.5, 2), [Round(NORMAL, FROZEN), Round(NORMAL, NORMAL)])
    assert "frozen ÷ normal: 1.025 (1.000 … 1.050)" in text
    assert "16 of 16 with Redis" in text
    assert "15 of 16 while it was frozen, with 17 encodes" in text
    assert "| frozen | 10.0 ms | 20.5 ms | 20.0 … 21.0 ms | 600 ms |" in text
