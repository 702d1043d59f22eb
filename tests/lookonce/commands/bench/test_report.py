"""The figures of a run, on measurements that are made up."""

from __future__ import annotations

import pytest

from lookonce.commands.bench.load import Measured
from lookonce.commands.bench.report import lines, report_of, spread
from lookonce.generation import Usage


def answered(start_s: float, latency_s: float, encoded: int = 0, cached: int = 0, skipped: int = 0) -> Measured:
    usage = Usage(10, 4, encoded + cached + skipped, encoded, cached, skipped, 5, 0.25, 0.5)
    return Measured(start_s, latency_s, latency_s / 2, encoded > 0, 1, usage)


def test_figures_count_answers_and_failures_apart() -> None:
    failed = Measured(1.0, 9.0, None, True, 1, None, "OverloadedError: full")
    report = report_of([answered(0.0, 2.0, encoded=16), answered(1.0, 4.0, cached=6, skipped=10), failed])
    assert (report.num_requests, report.num_failed, report.errors) == (3, 1, {"OverloadedError: full": 1})
    assert report.duration_s == 10.0
    assert (report.answers_per_s, report.completion_tokens_per_s) == (0.2, 1.0)
    assert (report.latency_s["mean"], report.latency_s["p50"], report.latency_s["max"]) == (3.0, 2.0, 4.0)
    assert report.first_text_s["max"] == 2.0
    assert report.image_rows == {"encoded": 16, "cached": 6, "skipped": 10}
    assert (report.num_encoding_requests, report.num_new) == (1, 2)
    assert (report.prompt_tokens, report.cached_prompt_tokens, report.completion_tokens) == (20, 8, 10)
    shown = dict(lines(report))
    assert shown["image rows"] == "16 encoded, 6 cached, 10 skipped"
    assert shown["answer, ms"].startswith("mean 3000.0, p50 2000.0,")


def test_a_run_without_answers_has_no_times() -> None:
    report = report_of([Measured(0.0, 1.0, None, False, 0, None, "x")])
    assert len(report.latency_s) == 0
    assert dict(lines(report))["answer, ms"] == "-"


@pytest.mark.parametrize(
    ("number", "expected"), [(1, (1, 1, 1)), (10, (5, 9, 10)), (100, (50, 90, 99)), (200, (100, 180, 198))]
)
def test_a_percentile_is_the_smallest_value_that_is_large_enough(number: int, expected: tuple[int, ...]) -> None:
    found = spread([float(value) for value in range(number, 0, -1)])
    assert [found["p50"], found["p90"], found["p99"]] == list(expected)
    assert found["max"] == number
