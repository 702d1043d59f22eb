"""What a dashboard shows, as plain data: which figures stand beside each other. How that looks is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

# What the reader chose above the panels, and the window that Grafana finds right for the resolution.
_CHOSEN = 'instance=~"$instance"'
_WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and how its lines are called."""

    expr: str
    # With `{{label}}` for a label's value.
    legend: str


@dataclass(frozen=True, slots=True)
class Graph:
    """Lines over time."""

    title: str
    # What one learns from it.
    description: str
    # One of Grafana's unit ids.
    unit: str
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    # Stays the same when the title changes; also the name of the file.
    uid: str
    title: str
    description: str
    # A metric of every process that may be chosen.
    processes: str
    # (heading, graphs) from top to bottom.
    sections: tuple[tuple[str, tuple[Graph, ...]], ...]


def _sum(what: str, by: str) -> str:
    return f"sum by ({by}) ({what})" if by else f"sum({what})"


def selected(name: str, only: str = "") -> str:
    """Samples of the processes that the reader chose; `only` are further matchers."""
    return f"{name}{{{f'{_CHOSEN}, {only}' if only else _CHOSEN}}}"


def rate(name: str, by: str = "", only: str = "") -> str:
    """Of a counter, per second."""
    return _sum(f"rate({selected(name, only)}[{_WINDOW}])", by)


def total(name: str, by: str = "instance") -> str:
    """Of a gauge."""
    return _sum(selected(name), by)


def ratio(part: str, whole: str) -> str:
    """Of two expressions with the same labels."""
    return f"{part} / {whole}"


def quantiles(name: str, by: str = "") -> tuple[Query, ...]:
    """Half and 99 of 100 of a histogram."""
    legend = f" {{{{{by}}}}}" if by else ""
    labels = f"le, {by}" if by else "le"
    rates = rate(f"{name}_bucket", labels)
    return tuple(Query(f"histogram_quantile({share}, {rates})", f"p{share * 100:g}{legend}") for share in (0.5, 0.99))


def mean(name: str) -> str:
    """Of what a histogram has observed."""
    return ratio(rate(f"{name}_sum"), rate(f"{name}_count"))


def calls_section() -> tuple[str, tuple[Graph, ...]]:
    """What both services tell of their calls and of themselves."""
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
                "From a call's arrival to its end.",
                "s",
                quantiles("lookonce_grpc_request_seconds", "method"),
            ),
            Graph(
                "Refused by quota",
                "Calls of tenants that had used up their share, per second, by the limit.",
                "ops",
                (Query(rate("lookonce_quota_refusals_total", "limit"), "{{limit}}"),),
            ),
            Graph(
                "Serving",
                "1 where health says SERVING.",
                "none",
                (Query(total("lookonce_serving"), "{{instance}}"),),
            ),
            Graph(
                "Drain",
                "How long processes have been draining, and how long they may.",
                "s",
                (
                    Query(total("lookonce_drain_seconds"), "{{instance}}"),
                    Query(f"max({selected('lookonce_drain_limit_seconds')})", "limit"),
                ),
            ),
            Graph(
                "Memory",
                "Resident memory of the processes.",
                "bytes",
                (Query(total("process_resident_memory_bytes"), "{{instance}}"),),
            ),
            Graph(
                "CPU",
                "CPUs in use.",
                "none",
                (Query(rate("process_cpu_seconds_total", "instance"), "{{instance}}"),),
            ),
        ),
    )
