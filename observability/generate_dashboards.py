"""Writes the dashboards that Grafana imports (observability/dashboards/*.json) from the boards: `make docs`."""

from __future__ import annotations

import itertools
import json
import pathlib

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from observability.board import Board, Graph
from observability.cache_board import CACHE
from observability.decoder_board import DECODER
from observability.encoder_board import ENCODER
from observability.gateway_board import GATEWAY

BOARDS = (ENCODER, DECODER, GATEWAY, CACHE)
FOLDER = pathlib.Path(__file__).with_name("dashboards")
_TAG = "lookonce"
# Size of a panel. Grafana's grid is 24 columns wide.
_WIDTH = 8
_HEIGHT = 8
# The data source that the reader has chosen.
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def dashboard_files() -> dict[str, str]:
    """Returns the JSON text of each dashboard by file name."""
    return {f"{board.uid}.json": _as_json(board) for board in BOARDS}


def _as_json(board: Board) -> str:
    text = json.dumps(_dashboard(board).build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False)
    return f"{text}\n"


def _dashboard(board: Board) -> dashboard.Dashboard:
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([_TAG])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(_other_boards())
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_instances(board.processes))
    )
    ids = itertools.count(1)
    for heading, graphs in board.sections:
        built = built.with_row(dashboard.Row(heading).id(next(ids)))
        for graph in graphs:
            built = built.with_panel(_panel(graph).id(next(ids)))
    return built


def _other_boards() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Lookonce").type(DashboardLinkType.DASHBOARDS).tags([_TAG])
    return link.as_dropdown(True).include_vars(False).keep_time(True)


def _instances(metric: str) -> dashboard.QueryVariable:
    """Returns a list of the processes that export `metric`, for the reader to choose from. All are chosen at first."""
    return (
        dashboard.QueryVariable("instance")
        .label("Process")
        .datasource(_SOURCE)
        .query(f"label_values({metric}, instance)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(graph: Graph) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(graph.title)
        .description(graph.description)
        .datasource(_SOURCE)
        .unit(graph.unit)
        .min(0)
        .height(_HEIGHT)
        .span(_WIDTH)
        .fill_opacity(8)
        .show_points(VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    for letter, query in zip("ABCDEFGH", graph.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).range().ref_id(letter)
        panel = panel.with_target(target.datasource(_SOURCE))
    return panel


if __name__ == "__main__":
    for _name, _text in dashboard_files().items():
        (FOLDER / _name).write_text(_text, "utf-8")
