"""Tests that the component networkpolicy allows every connection that the system needs, and no other.

The tests use a small model of a cluster's network. If any policy selects a pod for a direction, the pod may use only
the connections that its policies allow in this direction.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.k8s.manifests import CASES, DECODER, RANK, container_ports, environment, of_kind, pod_labels, selects
from tests.k8s.render import Manifest
from tests.k8s.variants import (
    GATEWAY,
    GPU_ALL,
    LEADER_WORKER_SET_AFFINITY,
    LEADER_WORKER_SET_PROD,
    NETWORK_POLICY,
    PROD_ALL,
    Variant,
)

_HERE = {"kubernetes.io/metadata.name": "lookonce"}
_CLIENTS = {"kubernetes.io/metadata.name": "shop", "lookonce-client": "true"}
_OTHERS = {"kubernetes.io/metadata.name": "elsewhere"}
_MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
_SYSTEM = {"kubernetes.io/metadata.name": "kube-system"}
_OBSERVABILITY = {"kubernetes.io/metadata.name": "observability"}
_ENVOY = "lookonce-encoder-affinity"
_DECODER_ENVOY = "lookonce-decoder-affinity"


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod in this or another namespace, or an address outside the cluster."""

    labels: dict[str, str]
    namespace: dict[str, str]
    address: str | None = None


def own(manifests: list[Manifest], name: str) -> Peer:
    """Returns the pods of this name as peers of others."""
    return Peer(pod_labels(manifests)[name], _HERE)


def _is_meant(rule: dict[str, Any], peer: Peer) -> bool:
    """Returns whether one entry of `from` or `to` matches this peer."""
    assert set(rule) <= {"podSelector", "namespaceSelector", "ipBlock"}
    if "ipBlock" in rule:
        networks = ipaddress.ip_network(rule["ipBlock"]["cidr"])
        return peer.address is not None and ipaddress.ip_address(peer.address) in networks
    if peer.address is not None:
        return False
    is_namespace = (
        selects(rule["namespaceSelector"], peer.namespace) if "namespaceSelector" in rule else peer.namespace == _HERE
    )
    return is_namespace and selects(rule.get("podSelector", {}), peer.labels)


def allows(
    manifests: list[Manifest], direction: str, name: str, other: Peer, port: str | int, number: int | None
) -> bool:
    """Returns whether a pod's policies allow a connection to a port of the callee; direction is Ingress or Egress.

    `port` is the name of the port, or its number if the callee is not one of our pods.
    """
    labels = pod_labels(manifests)[name]
    policies = [
        policy["spec"]
        for policy in of_kind(manifests, "NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], labels)
    ]
    assert policies, f"{name} is open in direction {direction}"
    key = {"Ingress": "from", "Egress": "to"}[direction]
    return any(
        any(entry.get("port", port) in {port, number} for entry in rule["ports"])
        and any(_is_meant(one, other) for one in rule[key])
        for policy in policies
        for rule in policy.get(direction.lower(), [])
    )


def _may_talk(manifests: list[Manifest], caller: str, called: str, port: str) -> bool:
    """Returns whether one pod of the namespace may call another. The policies of both must allow it."""
    number = container_ports(manifests, called)[port]
    return allows(manifests, "Egress", caller, own(manifests, called), port, number) and allows(
        manifests, "Ingress", called, own(manifests, caller), port, number
    )


def _wanted(manifests: list[Manifest]) -> set[tuple[str, str, str]]:
    """Returns the needed connections as (caller, callee, port)."""
    pods = pod_labels(manifests)
    found = {("lookonce-decoder", "lookonce-encoder", "grpc")}
    if _ENVOY in pods:
        found |= {("lookonce-decoder", _ENVOY, "grpc"), (_ENVOY, "lookonce-encoder", "grpc")}
    if _DECODER_ENVOY in pods:
        found.add((_DECODER_ENVOY, "lookonce-decoder", "grpc"))
    if "lookonce-gateway" in pods:
        found |= {("lookonce-gateway", called, "grpc") for called in ("lookonce-decoder", "lookonce-encoder")}
    if "lookonce-redis" in pods:
        found |= {(caller, "lookonce-redis", "redis") for caller in ("lookonce-encoder", "lookonce-decoder")}
    if RANK in pods:
        # Ranks listen on ports that their hosts choose, so the pods of a group may use all.
        found |= {
            (caller, DECODER.name, port)
            for caller in (DECODER.name, RANK)
            for port in container_ports(manifests, DECODER.name)
        }
    return found


@pytest.fixture(
    params=[NETWORK_POLICY, GATEWAY, PROD_ALL, GPU_ALL, LEADER_WORKER_SET_PROD, LEADER_WORKER_SET_AFFINITY], ids=str
)
def variant(request: pytest.FixtureRequest) -> Variant:
    one: Variant = request.param
    return one


def test_pods_of_the_namespace_talk_as_the_system_needs_and_no_more(manifests: list[Manifest]) -> None:
    pods = pod_labels(manifests)
    found = {
        (caller, called, port)
        for caller in pods
        for called in pods
        for port in container_ports(manifests, called)
        if _may_talk(manifests, caller, called, port)
    }
    # One rule lets decoders and Envoy call Envoy and encoders. It also lets Envoy call itself, which is harmless.
    assert found - {(_ENVOY, _ENVOY, "grpc")} == _wanted(manifests)


def test_clients_reach_grpc_and_the_gateway_and_nothing_else(manifests: list[Manifest]) -> None:
    client = Peer({}, _CLIENTS)
    for name in pod_labels(manifests):
        for port, number in container_ports(manifests, name).items():
            assert allows(manifests, "Ingress", name, client, port, number) == (port in ("grpc", "http"))


def test_prometheus_reaches_metrics_and_nothing_else(manifests: list[Manifest]) -> None:
    prometheus = Peer({"app.kubernetes.io/name": "prometheus"}, _MONITORING)
    for name in pod_labels(manifests):
        for port, number in container_ports(manifests, name).items():
            assert allows(manifests, "Ingress", name, prometheus, port, number) == (port == "metrics")


def test_other_connections_are_refused(manifests: list[Manifest]) -> None:
    strangers = [Peer({}, _OTHERS), Peer({}, _HERE), Peer({}, _OTHERS, "192.0.2.1"), Peer({}, _OTHERS, "10.1.2.3")]
    for stranger in strangers:
        for name in pod_labels(manifests):
            for port, number in container_ports(manifests, name).items():
                assert not allows(manifests, "Ingress", name, stranger, port, number)


def test_all_pods_resolve_names(manifests: list[Manifest]) -> None:
    server = Peer({"k8s-app": "kube-dns"}, _SYSTEM)
    for name in pod_labels(manifests):
        assert allows(manifests, "Egress", name, server, "dns", 53)
        # NodeLocal DNSCache has this address on each node.
        assert allows(manifests, "Egress", name, Peer({}, _OTHERS, "169.254.20.10"), "dns", 53)
        assert not allows(manifests, "Egress", name, Peer({}, _OTHERS, "169.254.20.10"), "https", 443)
        assert not allows(manifests, "Egress", name, Peer({}, _OTHERS, "169.254.169.254"), "dns", 53)
        assert not allows(manifests, "Egress", name, Peer({}, _OTHERS), "dns", 53)


def test_the_way_out_leads_to_an_external_cache_alone(variant: Variant, manifests: list[Manifest]) -> None:
    has_external = "networkpolicy/external-redis" in variant.components
    for name in ("lookonce-encoder", "lookonce-decoder"):
        for port in (6379, 26379):
            cache = Peer({}, _OTHERS, "10.1.2.3")
            assert allows(manifests, "Egress", name, cache, "redis", port) == has_external
        assert not allows(manifests, "Egress", name, Peer({}, _OTHERS, "10.1.2.3"), "https", 443)
        assert not allows(manifests, "Egress", name, Peer({}, _OTHERS, "192.0.2.1"), "redis", 6379)


def test_spans_go_to_the_collector_of_the_settings_alone(variant: Variant, manifests: list[Manifest]) -> None:
    collector = Peer({}, _OBSERVABILITY)
    for case in CASES:
        endpoint = environment(manifests, case).get("OTEL_EXPORTER_OTLP_ENDPOINT")
        assert (endpoint is not None) == ("networkpolicy/tracing" in variant.components)
        if endpoint is not None:
            host, _, port = endpoint.removeprefix("http://").partition(":")
            assert host.partition(".")[2] == _OBSERVABILITY["kubernetes.io/metadata.name"]
            assert allows(manifests, "Egress", case.name, collector, "otlp", int(port))
            assert not allows(manifests, "Egress", case.name, Peer({}, _OTHERS), "otlp", int(port))
        assert not allows(manifests, "Egress", case.name, collector, "https", 443)
