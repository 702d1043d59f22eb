"""The benchmark asks more than can be answered, and counts what becomes of every request."""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from benchmarks.overload import Figures, Load, Phase, condensed, measure, section
from tests.tiny_models import build_llava_clip

SHORT = Load(num_concurrent=8, num_running=2, shares=(0.5, 3.0), duration_s=1.5, num_rounds=1, num_tokens=30)


def phase(goodput: float, outcomes: dict[str, int], refused_s: tuple[float, ...] = ()) -> Phase:
    return Phase(None, goodput, sum(outcomes.values()), outcomes, sum(outcomes.values()), refused_s, 0.5)


FIGURES = Figures(
    SHORT,
    1.0,
    phase(9, {"ok": 18}),
    phase(10, {"ok": 20}),
    {
        0.5: [phase(5, {"ok": 10}), phase(4, {"ok": 8})],
        3.0: [phase(9, {"ok": 18, "refused": 2}, (0.01, 0.03)), phase(5, {"ok": 10, "late": 1, "EndError": 1})],
    },
)


def test_every_request_is_answered_and_the_decoder_has_ended_as_many(tmp_path: pathlib.Path) -> None:
    figures = asyncio.run(measure(build_llava_clip(tmp_path), SHORT, "thread"))
    phases = [figures.full_batch, figures.closed, *(found for (found,) in figures.open_loop.values())]
    for one in phases:
        assert one.num_sent == one.num_answered >= one.num_seen_by_decoder > 0
        # On a busy machine a deadline can pass before the decoder has the call.
        assert one.num_answered - one.num_seen_by_decoder <= one.outcomes.get("late", 0)
        assert set(one.outcomes) <= {"ok", "refused", "late"}
    for one in (figures.full_batch, figures.closed):
        assert set(one.outcomes) == {"ok"}
    assert len(figures.refused_s) == sum(one.outcomes.get("refused", 0) for one in phases)


def test_the_highest_load_is_compared_with_the_best_of_each_round() -> None:
    assert FIGURES.goodput_ratios == [1.0, 1.0]
    better = Figures(SHORT, 1.0, FIGURES.full_batch, FIGURES.closed, {0.5: [phase(8, {})], 3.0: [phase(6, {})]})
    assert better.goodput_ratios == [pytest.approx(0.75)]


def test_the_section_tells_outcomes_and_refusals() -> None:
    text = section("m", {"process": FIGURES})
    assert "The engine in a process; deadline 1.00 s:" in text
    assert "| time to a refusal, median and P99 | 10.0 ms | 30.0 ms |" in text
    assert "| answered ÷ sent, and ended by the decoder ÷ sent | 88 ÷ 88 | 88 ÷ 88 |" in text
    assert "| arrivals at 3 of that speed | 7.0 | 5.00 … 9.00 | 0.50 s | 28, 2, 1, 1 |" in text


def test_json_has_quantiles_instead_of_all_refusals() -> None:
    record = condensed(FIGURES)
    rounds = record["open_loop"]
    assert isinstance(rounds, dict)
    assert rounds[3.0][0]["refused_s"] == {0.5: 0.01, 0.9: 0.03, 0.99: 0.03, 1.0: 0.03}
    assert rounds[0.5][0]["refused_s"] == {}
