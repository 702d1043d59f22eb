"""Tests that the components hpa and keda scale on metrics that the services export, and do not conflict.

The validator of the other tests does not know KEDA's definitions. This module contains the parts of them that we use,
from KEDA's reference of ScaledObject and of its Prometheus scaler.
"""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest

from docs.generate_metrics import SERVICES, Service, service_metrics
from tests.k8s.manifests import CASES, ServiceCase, find, names, of_kind, parsed_settings
from tests.k8s.render import Manifest, load_documents
from tests.k8s.variants import HPA, K8S, KEDA, VARIANTS, rendered

_METRIC = re.compile(r"\blookonce_\w+")
_NEWEST = "1.37"
scaled = pytest.mark.parametrize("service", SERVICES)


def adapter_rules() -> list[dict[str, Any]]:
    """The rules that operators give to prometheus-adapter."""
    (document,) = load_documents(K8S / "components/hpa/adapter-rules.yaml")
    assert set(document) == {"rules"}
    rules: list[dict[str, Any]] = document["rules"]
    return rules


def series_of(service: Service) -> set[str]:
    """Returns the names under which Prometheus stores the metrics of this service."""
    return {name for row in service_metrics(service) for name in row.series}


def service_of(query: str) -> Service:
    """Returns the one service whose metrics a query uses."""
    (found,) = (one for one in SERVICES if f"lookonce_{one}_" in query)
    return found


def test_adapter_rules_ask_for_series_that_are_exported() -> None:
    for rule in adapter_rules():
        assert set(rule) <= {"seriesQuery", "resources", "name", "metricsQuery"}
        assert rule["resources"] == {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}}
        asked = _METRIC.findall(rule["seriesQuery"] + rule["metricsQuery"])
        assert set(asked) <= series_of(service_of(rule["metricsQuery"]))


@scaled
def test_the_autoscaler_uses_the_metric_that_the_adapter_makes_of_that_service(service: Service) -> None:
    (metric,) = find(rendered(HPA), "HorizontalPodAutoscaler", f"lookonce-{service}")["spec"]["metrics"]
    made = {
        rule.get("name", {}).get("as", _METRIC.findall(rule["seriesQuery"])[0]): service_of(rule["metricsQuery"])
        for rule in adapter_rules()
    }
    assert made[metric["pods"]["metric"]["name"]] == service


@scaled
def test_keda_asks_for_series_that_the_service_exports(service: Service) -> None:
    (trigger,) = find(rendered(KEDA), "ScaledObject", f"lookonce-{service}")["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert service_of(query) == service
    asked = set(_METRIC.findall(query))
    assert asked
    assert asked <= series_of(service)
    # Every selector names namespace and Service, so that a second instance does not count.
    assert query.count(f'{{namespace="lookonce",service="lookonce-{service}"}}') == len(_METRIC.findall(query))


@scaled
def test_both_ways_scale_alike(service: Service) -> None:
    autoscaler = find(rendered(HPA), "HorizontalPodAutoscaler", f"lookonce-{service}")["spec"]
    scaled_object = find(rendered(KEDA), "ScaledObject", f"lookonce-{service}")["spec"]
    assert scaled_object["minReplicaCount"] == autoscaler["minReplicas"]
    assert scaled_object["maxReplicaCount"] == autoscaler["maxReplicas"]
    assert scaled_object["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == autoscaler["behavior"]
    (metric,), (trigger,) = autoscaler["metrics"], scaled_object["triggers"]
    assert trigger["metadata"]["threshold"] == metric["pods"]["target"]["averageValue"]
    # KEDA divides the sum over all pods by their number; the autoscaler takes the mean of pods itself.
    assert trigger["metadata"]["query"].startswith("sum(")
    assert trigger["metricType"] == metric["pods"]["target"]["type"] == "AverageValue"


@scaled
def test_scaled_objects_match_kedas_schema(service: Service) -> None:
    one = find(rendered(KEDA), "ScaledObject", f"lookonce-{service}")
    assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
    assert one["apiVersion"] == "keda.sh/v1alpha1"
    spec = one["spec"]
    assert set(spec) == {
        "scaleTargetRef",
        "pollingInterval",
        "minReplicaCount",
        "maxReplicaCount",
        "fallback",
        "advanced",
        "triggers",
    }
    assert set(spec["scaleTargetRef"]) == {"apiVersion", "kind", "name"}
    assert spec["fallback"]["behavior"] in {
        "static",
        "currentReplicas",
        "currentReplicasIfHigher",
        "currentReplicasIfLower",
    }
    assert 0 < spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
    assert set(spec["advanced"]) == {"horizontalPodAutoscalerConfig"}
    (trigger,) = spec["triggers"]
    assert (set(trigger), trigger["type"]) == ({"type", "metricType", "metadata"}, "prometheus")
    assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold", "ignoreNullValues"}
    # All metadata of a trigger are strings, including numbers and booleans.
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert float(trigger["metadata"]["threshold"]) > 0
    # KEDA creates an autoscaler from it.
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": one["metadata"],
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }
    assert kubernetes_validate.validate(autoscaler, _NEWEST, strict=True) == _NEWEST


@pytest.mark.parametrize("variant", [HPA, KEDA], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_deployment_leaves_the_number_of_pods_to_the_autoscaler(variant: Any, case: ServiceCase) -> None:
    manifests = rendered(variant)
    assert "replicas" not in find(manifests, "Deployment", case.name)["spec"]
    kind = "ScaledObject" if variant == KEDA else "HorizontalPodAutoscaler"
    target = find(manifests, kind, case.name)["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": case.name}
    # Clients find new pods within minutes.
    assert parsed_settings(manifests, case).max_connection_age_s <= 120


def test_no_variant_scales_twice() -> None:
    for variant in VARIANTS:
        assert not {"hpa", "keda"} <= set(variant.components)


def test_disruption_budgets_let_nodes_be_emptied_at_the_least_number_of_pods() -> None:
    manifests: list[Manifest] = rendered(HPA)
    for autoscaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        name = autoscaler["metadata"]["name"]
        assert name in names(manifests, "PodDisruptionBudget")
        budget = find(manifests, "PodDisruptionBudget", name)["spec"]
        assert 0 < budget["maxUnavailable"] < autoscaler["spec"]["minReplicas"]
