"""Tests that the component grpc-route leads clients outside the cluster to both services, and to nothing else.

The validator of the other tests does not know the Gateway API's definitions. This module contains the parts of them
that we use, from the reference of GRPCRoute v1.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s.manifests import CASES, ServiceCase, names, of_kind, service_port
from tests.k8s.variants import GRPC_ROUTE, K8S, rendered


@pytest.fixture
def route() -> dict[str, Any]:
    (one,) = of_kind(rendered(GRPC_ROUTE), "GRPCRoute")
    return one


def test_it_matches_the_gateway_apis_schema(route: dict[str, Any]) -> None:
    assert set(route) == {"apiVersion", "kind", "metadata", "spec"}
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert set(route["spec"]) == {"parentRefs", "hostnames", "rules"}
    for parent in route["spec"]["parentRefs"]:
        assert set(parent) == {"name", "namespace", "sectionName"}
        assert all(isinstance(value, str) for value in parent.values())
    assert all(isinstance(name, str) for name in route["spec"]["hostnames"])
    for rule in route["spec"]["rules"]:
        # There is no field for timeouts in a GRPCRoute.
        assert set(rule) == {"matches", "backendRefs"}
        for match in rule["matches"]:
            assert set(match) == {"method"}
            assert set(match["method"]) == {"type", "service"}
            assert match["method"]["type"] == "Exact"
        for backend in rule["backendRefs"]:
            # Without group and kind it is a Service, without a namespace one of the route's own.
            assert set(backend) == {"name", "port"}


def test_it_leads_to_the_services_of_the_clients_contract_alone(route: dict[str, Any]) -> None:
    called = [match["method"]["service"] for rule in route["spec"]["rules"] for match in rule["matches"]]
    # Neither health of single pods nor the calls of operators.
    assert sorted(called) == sorted(case.full_name for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_call_goes_to_the_service_that_answers_it(route: dict[str, Any], case: ServiceCase) -> None:
    manifests = rendered(GRPC_ROUTE)
    (rule,) = (one for one in route["spec"]["rules"] if one["matches"][0]["method"]["service"] == case.full_name)
    assert rule["backendRefs"] == [{"name": case.name, "port": service_port(manifests, case.name, "grpc")}]
    assert case.name in names(manifests, "Service")


def test_the_comments_example_uses_the_host_name_of_the_route(route: dict[str, Any]) -> None:
    text = (K8S / "components/grpc-route/kustomization.yaml").read_text("utf-8")
    (host,) = route["spec"]["hostnames"]
    assert f'connect("{host}:443", encoder_target="{host}:443"' in text
