"""Dashboards as plain data: which graphs exist and in what order. generate_dashboards.py decides their appearance."""

from __future__ import annotations

from dataclasses import dataclass

# The choice in the list above the panels, and the window that Grafana computes for the resolution.
_CHOSEN = 'instance=~"$instance"'
_WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its lines."""

    expr: str
    # Text in which `{{label}}` stands for the value of a label.
    legend: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One panel of a dashboard, with lines over time."""

    title: str
    # The explanation that Grafana shows for the panel.
    description: str
    # One of Grafana's unit ids.
    unit: str
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard with all its sections."""

    # Permanent id, also the name of the file. It stays the same if the title changes.
    uid: str
    title: str
    description: str
    # Metric of every process that the reader may choose.
    processes: str
    # (heading, graphs) from top to bottom.
    sections: tuple[tuple[str, tuple[Graph, ...]], ...]


def _sum(what: str, by: str) -> str:
    return f"sum by ({by}) ({what})" if by else f"sum({what})"


def selected(name: str, only: str = "") -> str:
    """Returns a selector for the processes that the reader chose; `only` has further matchers."""
    return f"{name}{{{f'{_CHOSEN}, {only}' if only else _CHOSEN}}}"


def rate(name: str, by: str = "", only: str = "") -> str:
    """Returns the rate of a counter per second, summed by the labels in `by`."""
    return _sum(f"rate({selected(name, only)}[{_WINDOW}])", by)


def total(name: str, by: str = "instance") -> str:
    """Returns the sum of a gauge by the labels in `by`."""
    return _sum(selected(name), by)


def ratio(part: str, whole: str) -> str:
    """Returns the ratio of two expressions with the same labels."""
    return f"{part} / {whole}"


def quantiles(name: str, by: str = "") -> tuple[Query, ...]:
    """Returns queries for the median and the 99th percentile of a histogram."""
    legend = f" {{{{{by}}}}}" if by else ""
    labels = f"le, {by}" if by else "le"
    rates = rate(f"{name}_bucket", labels)
    return tuple(Query(f"histogram_quantile({share}, {rates})", f"p{share * 100:g}{legend}") for share in (0.5, 0.99))


def mean(name: str) -> str:
    """Returns the mean of the observations of a histogram."""
    return ratio(rate(f"{name}_sum"), rate(f"{name}_count"))


# Both services have it.
KERNELS = Graph(
    "CPU kernels",
    "Speed of the implementation in use over PyTorch's, in the trial at start-up; no data on other devices.",
    "none",
    (
        Query(
            total("lookonce_kernel_speed_ratio", "instance, operation, implementation"),
            "{{instance}} {{operation}}, {{implementation}}",
        ),
    ),
)


def calls_section() -> tuple[str, tuple[Graph, ...]]:
    """Returns the section on calls and processes, which both services have."""
    return (
        "Calls",
        (
            Graph(
                "Calls",
                "Finished calls per second, by method and status.",
                "reqps",
                (Query(rate("lookonce_grpc_requests_total", "method, code"), "{{method}} {{code}}"),),
            ),
            Graph(
                "Time of calls",
                "Time from the arrival of a call to its end.",
                "s",
                quantiles("lookonce_grpc_request_seconds", "method"),
            ),
            Graph(
                "Refused by quota or for lack of memory",
                "Per second: refused calls of tenants that had used up their quota, by limit, and calls for which the "
                "process had no memory, by method.",
                "ops",
                (
                    Query(rate("lookonce_quota_refusals_total", "limit"), "{{limit}}"),
                    Query(rate("lookonce_grpc_memory_errors_total", "method"), "no memory, {{method}}"),
                ),
            ),
            Graph(
                "Dropped calls",
                "Per second: calls that clients cancelled, or whose deadline had passed, before they started. Many of "
                "them mean an attack or deadlines that are too short.",
                "ops",
                (Query(rate("lookonce_grpc_dropped_requests_total", "code"), "{{code}}"),),
            ),
            Graph(
                "Serving",
                "1 if health says SERVING, otherwise 0.",
                "none",
                (Query(total("lookonce_serving"), "{{instance}}"),),
            ),
            Graph(
                "Drain",
                "Time since the start of the drain, and the limit.",
                "s",
                (
                    Query(total("lookonce_drain_seconds"), "{{instance}}"),
                    Query(f"max({selected('lookonce_drain_limit_seconds')})", "limit"),
                ),
            ),
            *_process_graphs(),
        ),
    )


def _process_graphs() -> tuple[Graph, ...]:
    """Returns the graphs of the operating system's figures."""
    return (
        Graph(
            "Memory",
            "Resident memory of the processes.",
            "bytes",
            (Query(total("process_resident_memory_bytes"), "{{instance}}"),),
        ),
        Graph(
            "CPU",
            "Number of CPUs in use.",
            "none",
            (Query(rate("process_cpu_seconds_total", "instance"), "{{instance}}"),),
        ),
    )
