"""Dashboard of the gateway: requests, their statuses and their times."""

from __future__ import annotations

from observability.board import Board, Graph, Query, quantiles, rate, total

GATEWAY = Board(
    "lookonce-gateway",
    "Lookonce gateway",
    "HTTP requests from their head to the end of their answers.",
    "lookonce_gateway_requests_in_flight",
    (
        (
            "Requests",
            (
                Graph(
                    "Requests",
                    "Requests that ended per second, by path and status. 499: the client went before the end.",
                    "reqps",
                    (Query(rate("lookonce_gateway_requests_total", "path, status"), "{{path}} {{status}}"),),
                ),
                Graph(
                    "Time",
                    "Time from the head of a request to the end of its answer.",
                    "s",
                    quantiles("lookonce_gateway_request_duration_seconds", "path"),
                ),
                Graph(
                    "In progress",
                    "Requests in progress.",
                    "none",
                    (Query(total("lookonce_gateway_requests_in_flight"), "{{instance}}"),),
                ),
            ),
        ),
    ),
)
