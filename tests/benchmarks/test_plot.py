"""Charts: bars are as long as their medians, and what was not run is said, not drawn."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks.plot import CHARTS, Chart, draw
from benchmarks.report import JSON_FOLDER

_SVG = "{http://www.w3.org/2000/svg}"


def bar_widths(drawn: str) -> list[float]:
    """Returns the widths of all bars, from top to bottom."""
    elements = ElementTree.fromstring(drawn).iter(f"{_SVG}rect")
    return [float(element.get("width", "")) for element in elements if element.get("class") == "bar"]


def test_bars_are_as_long_as_their_medians() -> None:
    chart = Chart("a < b", " req/s", ("one", "two"), {"x": [[1.0, 2.0, 9.0], [4.0]], "y": [[8.0], []]})
    drawn = draw(chart)
    two, four, eight = bar_widths(drawn)
    assert (four / two, eight / two) == pytest.approx((2, 4), rel=0.01)
    assert "not run" in drawn
    assert "8 req/s" in drawn


def test_a_chart_without_figures_is_still_one() -> None:
    assert bar_widths(draw(Chart("none", "", ("one",), {"x": [[]]}))) == []


@pytest.mark.parametrize("script", CHARTS)
def test_charts_draw_the_results_that_are_kept(script: str) -> None:
    results = JSON_FOLDER / f"{script}.json"
    if not results.exists():
        pytest.skip("this script's results are not kept yet")
    assert bar_widths(draw(CHARTS[script](json.loads(results.read_text("utf-8")))))
