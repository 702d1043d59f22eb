"""Tests that the committed dashboards are those of the code, and use only series that the services export."""

from __future__ import annotations

import json
from typing import Any

import pytest

from observability.generate_dashboards import BOARDS, FOLDER, dashboard_files
from tests.observability.promql import asked, exported

# Labels that a scrape adds to every series.
TARGET_LABELS = {"instance", "job"}
COUNTER_FUNCTIONS = {"rate", "irate", "increase"}
# This series is always empty, because decoders only read.
NEVER_SHOWN = {"lookonce_decoder_store_writes_total"}

boards = pytest.mark.parametrize("name", [f"{board.uid}.json" for board in BOARDS])


def committed(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text("utf-8"))
    return loaded


def graphs_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in graphs_of(dashboard) for target in panel["targets"]]


def test_the_committed_dashboards_are_current() -> None:
    files = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir()}
    assert files == dashboard_files(), "run `make docs`"


@boards
def test_every_series_and_label_is_exported(name: str) -> None:
    known = exported()
    for text in expressions(committed(name)):
        for series in asked(text).names:
            assert series in known, text
        for series, label in asked(text).labels:
            assert label in known[series][1] | TARGET_LABELS, text


@boards
def test_rates_are_taken_of_counters_and_counters_are_shown_as_rates(name: str) -> None:
    known = exported()
    for text in expressions(committed(name)):
        found = asked(text)
        for function, series in found.ranges:
            assert (known[series][0] == "counter") == (function in COUNTER_FUNCTIONS), text
        rated = {series for _, series in found.ranges}
        assert not [series for series in found.names - rated if known[series][0] == "counter"], text


@boards
def test_every_expression_follows_the_choice_of_processes(name: str) -> None:
    for text in expressions(committed(name)):
        found = asked(text)
        assert found.names == {series for series, label in found.labels if label == "instance"}, text


@boards
def test_panels_have_ids_titles_and_places_of_their_own(name: str) -> None:
    panels = committed(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(column for column, _ in cells) < 24
    for panel in graphs_of(committed(name)):
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {
        series for name in dashboard_files() for text in expressions(committed(name)) for series in asked(text).names
    }
    known = {series for series in exported() if series.startswith("lookonce_")}
    ends = ("_bucket", "_sum", "_count")
    assert {series for series in known - shown if not series.endswith(ends)} == NEVER_SHOWN
    histograms = {series.removesuffix("_count") for series in known if series.endswith("_count")}
    assert {name for name in histograms if not any(f"{name}{end}" in shown for end in ends)} == set()


@pytest.mark.parametrize("text", ["rate(lookonce_serving)", "sum(rate(a[5m])", "a + "])
def test_invalid_promql_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        asked(text)
