"""The endpoint answers scrapes, whatever other clients of it do, and needs one thread for all of them."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from lookonce.server import metrics_endpoint
from lookonce.server.metrics_endpoint import MetricsEndpoint


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("lookonce_test_things", "Things.", registry=registry).inc(3)
    return registry


@pytest.fixture
def endpoint(registry: CollectorRegistry) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint("127.0.0.1", 0, registry)
    yield endpoint
    endpoint.stop()


def connected(endpoint: MetricsEndpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=10)


def scraped(endpoint: MetricsEndpoint, **headers: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        content: bytes = response.read()
    return content


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def test_a_scrape_is_answered_while_300_silent_connections_are_held(endpoint: MetricsEndpoint) -> None:
    num_threads = threading.active_count()
    num_files = psutil.Process().num_fds()
    with ExitStack() as held:
        for _ in range(300):
            held.enter_context(connected(endpoint))
        for _ in range(3):
            assert b"lookonce_test_things_total 3.0" in scraped(endpoint)
        assert threading.active_count() <= num_threads
        # One end of each is this test's own.
        assert psutil.Process().num_fds() - num_files - 300 <= metrics_endpoint._MAX_CONNECTIONS + 2


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000])
def test_a_request_that_does_not_arrive_is_not_waited_for(
    sent: bytes, endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(metrics_endpoint, "_REQUEST_S", 0.2)
        with connected(endpoint) as connection:
            connection.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert until_closed(connection) == b""
    assert b"lookonce_test_things_total" in scraped(endpoint)


def test_an_answer_that_is_not_read_is_given_up(
    registry: CollectorRegistry, endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The answer to another scrape must also be taken within it, on a busy machine too.
    monkeypatch.setattr(metrics_endpoint, "_ANSWER_S", 2.0)
    large = Gauge("lookonce_test_large", "Much text.", labelnames=("text",), registry=registry)
    for number in range(200):
        large.labels(f"{number}" + "x" * 100_000).set(1)
    with connected(endpoint) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        received = len(connection.recv(1))
        large.clear()
        assert b"lookonce_test_things_total" in scraped(endpoint)
        limit_s = time.monotonic() + 30
        while endpoint._open and time.monotonic() < limit_s:
            time.sleep(0.01)
        with contextlib.suppress(ConnectionResetError):
            received += len(until_closed(connection))
    assert received < 20_000_000


def test_formats_and_errors_are_those_of_prometheus(endpoint: MetricsEndpoint) -> None:
    assert gzip.decompress(scraped(endpoint, **{"Accept-Encoding": "gzip"})).startswith(b"# HELP lookonce_test_things")
    open_metrics = scraped(endpoint, Accept="application/openmetrics-text; version=1.0.0")
    assert open_metrics.endswith(b"# EOF\n")
    for sent, status in [(b"POST / HTTP/1.1", b"405"), (b"nonsense", b"400"), (b"GET /?name[]=a HTTP/1.0", b"200")]:
        with connected(endpoint) as connection:
            connection.sendall(sent + b"\r\n\r\n")
            assert until_closed(connection).split(b" ")[1] == status


def test_a_collector_that_fails_is_an_error_of_that_scrape(
    registry: CollectorRegistry, endpoint: MetricsEndpoint
) -> None:
    faults = [ValueError("secret")]
    gauge = Gauge("lookonce_test_faulty", "Fails once.", registry=registry)
    gauge.set_function(lambda: _raised(faults.pop()) if faults else 1.0)
    with pytest.raises(urllib.error.HTTPError) as caught:
        scraped(endpoint)
    assert caught.value.code == 500
    assert b"secret" not in caught.value.read()
    caught.value.close()
    assert b"lookonce_test_faulty 1.0" in scraped(endpoint)


def _raised(error: Exception) -> float:
    raise error
