"""Parses PromQL expressions for the series that they use, and lists the series that the services export."""

from __future__ import annotations

from dataclasses import dataclass

import promql_parser
from prometheus_client import CollectorRegistry, ProcessCollector

from docs.generate_metrics import all_metrics

# Grafana replaces this by a duration. Any duration is fine for parsing.
_WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Asked:
    """The series and labels that one expression uses."""

    # Names of all series.
    names: frozenset[str]
    # (function, series) for each function that takes a range of a series.
    ranges: frozenset[tuple[str, str]]
    # (series, label) of every matcher.
    labels: frozenset[tuple[str, str]]


def asked(text: str) -> Asked:
    """Returns the series and labels of an expression. Raises ValueError if the text is not PromQL."""
    names, ranges, labels = set[str](), set[tuple[str, str]](), set[tuple[str, str]]()

    def visit(expression: promql_parser.Expr) -> None:
        if isinstance(expression, promql_parser.VectorSelector):
            assert expression.name is not None, f"a series without a name in {text}"
            names.add(expression.name)
            labels.update((expression.name, matcher.name) for matcher in expression.matchers.matchers)
        elif isinstance(expression, promql_parser.Call):
            for argument in expression.args:
                if isinstance(argument, promql_parser.MatrixSelector):
                    ranges.add((expression.func.name, str(argument.vector_selector.name)))

    promql_parser.walk(promql_parser.parse(text.replace(_WINDOW, "5m")), visit)
    return Asked(frozenset(names), frozenset(ranges), frozenset(labels))


def exported() -> dict[str, tuple[str, frozenset[str]]]:
    """Returns type and labels of each series of both services. The series of a histogram are counters."""
    found = {
        series: ("counter" if row.kind == "histogram" else row.kind, frozenset(row.labels) | _le(series))
        for row in all_metrics()
        for series in row.series
    }
    registry = CollectorRegistry()
    for family in ProcessCollector(registry=registry).collect():
        found |= {sample.name: (family.type, frozenset[str]()) for sample in family.samples}
    # A series that Prometheus adds itself.
    return found | {"up": ("gauge", frozenset[str]())}


def _le(series: str) -> frozenset[str]:
    return frozenset({"le"} if series.endswith("_bucket") else ())
