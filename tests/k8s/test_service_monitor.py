"""Tests that the component servicemonitor makes Prometheus scrape encoders and decoders, and nothing else.

The validator of the other tests does not know the Prometheus operator's definition. This module contains the parts of
it that we use, from the operator's reference of ServiceMonitor.
"""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from lookonce.server.interceptors import CallMetrics
from tests.k8s.manifests import APP, CASES, ServiceCase, find, of_kind, parsed_settings, port_of, selects, service_port
from tests.k8s.variants import SERVICE_MONITOR, rendered


def test_it_matches_the_operators_schema() -> None:
    (monitor,) = of_kind(rendered(SERVICE_MONITOR), "ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(monitor["spec"]) == {"selector", "jobLabel", "endpoints"}
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(endpoint) == {"port", "path", "interval"}


def test_it_meets_the_services_of_encoders_and_decoders_alone() -> None:
    manifests = rendered(SERVICE_MONITOR)
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    found = {
        service["metadata"]["name"]
        for service in of_kind(manifests, "Service")
        if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
    }
    assert found == {case.name for case in CASES}
    assert monitor["spec"]["jobLabel"] == APP


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_asks_the_port_where_metrics_are(case: ServiceCase) -> None:
    manifests = rendered(SERVICE_MONITOR)
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    settings = parsed_settings(manifests, case)
    assert service_port(manifests, case.name, endpoint["port"]) == port_of(settings.metrics_listen)
    ports = find(manifests, "Service", case.name)["spec"]["ports"]
    assert endpoint["port"] in {port["targetPort"] for port in ports}


def test_its_path_has_the_metrics() -> None:
    (monitor,) = of_kind(rendered(SERVICE_MONITOR), "ServiceMonitor")
    registry = CollectorRegistry()
    CallMetrics(registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        url = f"http://127.0.0.1:{server.server_port}{monitor['spec']['endpoints'][0]['path']}"
        with urllib.request.urlopen(url, timeout=10) as response:
            assert "lookonce_grpc_requests_total" in response.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
