"""A page of metrics as prometheus_client writes it, read over HTTP as Prometheus does."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from lookonce.errors import UnavailableError
from lookonce.local.metrics_page import MetricsPage, read_metrics
from lookonce.server.metrics_endpoint import MetricsEndpoint


@pytest.fixture
def address() -> Iterator[str]:
    registry = CollectorRegistry()
    hits = Counter("hits", "Look-ups.", ["tier", "kind"], registry=registry)
    hits.labels("local", "a b").inc(2)
    hits.labels("local", "c").inc(0.5)
    hits.labels("shared", "c").inc(4e9)
    Gauge("usage", "A share.", registry=registry).set(0.25)
    endpoint = MetricsEndpoint("127.0.0.1", 0, registry)
    yield f"127.0.0.1:{endpoint.port}"
    endpoint.stop()


def test_samples_are_summed_over_the_labels_that_are_not_given(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    page = read_metrics(address)
    assert page.total("hits_total") == 4e9 + 2.5
    assert page.total("hits_total", tier="local") == 2.5
    assert page.total("hits_total", tier="local", kind="a b") == 2.0
    assert page.total("usage") == 0.25
    assert page.total("nothing") == 0.0
    assert page.has("hits_")
    assert not page.has("misses_")


def test_what_is_no_page_of_metrics_is_empty() -> None:
    assert not MetricsPage("<html>\n# HELP x\n\n").has("x")


def test_an_address_without_metrics_is_a_clear_error(address: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        silent = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"no metrics at {silent}: Connection refused"):
            read_metrics(silent)
    for wrong in ("127.0.0.1:nothing", "a b:1"):
        with pytest.raises(UnavailableError, match="no metrics at"):
            read_metrics(wrong)
