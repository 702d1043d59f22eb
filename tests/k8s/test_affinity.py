"""Tests of the Envoys in front of encoders and decoders: their definitions accept the configuration, and it routes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from decoder_svc.settings import DecoderSettings
from lookonce.identity import AFFINITY_KEY
from tests.k8s.manifests import (
    DECODER,
    ENCODER,
    ServiceCase,
    container,
    container_ports,
    expanded,
    find,
    parsed_settings,
    patience_s,
    pod,
    service_port,
    variables,
)
from tests.k8s.render import Manifest
from tests.k8s.variants import AFFINITY, GPU_ALL, K8S, Variant, rendered


@dataclass(frozen=True, slots=True)
class Proxy:
    """One of the two components."""

    variant: Variant
    # Name of its deployment, too.
    name: str
    # Name of its listener and of its cluster.
    cluster: str
    service: ServiceCase
    # Header of calls about one image, with its digest.
    header: str


ENCODERS = Proxy(AFFINITY, "lookonce-encoder-affinity", "encoders", ENCODER, "x-lookonce-digest")
DECODERS = Proxy(GPU_ALL, "lookonce-decoder-affinity", "decoders", DECODER, AFFINITY_KEY)
_DEFINITIONS = (
    "envoy.config.bootstrap.v3.bootstrap_pb2",
    "envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2",
    "envoy.extensions.filters.http.router.v3.router_pb2",
    "envoy.extensions.upstreams.http.v3.http_protocol_options_pb2",
)


@pytest.fixture(scope="module", params=[ENCODERS, DECODERS], ids=lambda proxy: proxy.cluster)
def proxy(request: pytest.FixtureRequest) -> Proxy:
    one: Proxy = request.param
    return one


@pytest.fixture(scope="module")
def manifests(proxy: Proxy) -> list[Manifest]:
    return rendered(proxy.variant)


@pytest.fixture(scope="module")
def configuration(proxy: Proxy, manifests: list[Manifest]) -> dict[str, Any]:
    """Envoy's configuration: that of the config map with that of the arguments."""
    one = container(manifests, proxy.name)
    known = variables(one, find(manifests, "Deployment", proxy.name)["metadata"]["namespace"])
    loaded: dict[str, Any] = yaml.safe_load(find(manifests, "ConfigMap", proxy.name)["data"]["envoy.yaml"])
    added = yaml.safe_load(expanded(one["args"][one["args"].index("--config-yaml") + 1], known))
    # Envoy appends lists of the second configuration to those of the first.
    assert list(added) == ["static_resources"]
    assert list(added["static_resources"]) == ["clusters"]
    loaded["static_resources"]["clusters"] += added["static_resources"]["clusters"]
    return loaded


def _address(named: dict[str, Any]) -> tuple[str, int]:
    socket = named["address"]["socket_address"]
    return socket["address"], socket["port_value"]


def _listener(configuration: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in configuration["static_resources"]["listeners"] if one["name"] == name)
    listener: dict[str, Any] = found
    return listener


def _routes(configuration: dict[str, Any], name: str) -> list[dict[str, Any]]:
    (chain,) = _listener(configuration, name)["filter_chains"]
    (manager,) = chain["filters"]
    (host,) = manager["typed_config"]["route_config"]["virtual_hosts"]
    routes: list[dict[str, Any]] = host["routes"]
    return routes


def _cluster(configuration: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in configuration["static_resources"]["clusters"] if one["name"] == name)
    cluster: dict[str, Any] = found
    return cluster


def _parse(configuration: dict[str, Any]) -> None:
    """Parses the configuration. Raises ParseError for a field, a type or a value that Envoy does not know."""
    reason = "the Python package xds-protos, Envoy's own definitions, is not installed"
    modules = [pytest.importorskip(name, reason=reason) for name in _DEFINITIONS]
    json_format = importlib.import_module("google.protobuf.json_format")
    json_format.ParseDict(configuration, modules[0].Bootstrap())


def test_envoys_definitions_accept_it(configuration: dict[str, Any]) -> None:
    _parse(configuration)


def test_envoys_definitions_refuse_a_field_that_does_not_exist(configuration: dict[str, Any]) -> None:
    clusters = [{**one, "lb_polcy": "RING_HASH"} for one in configuration["static_resources"]["clusters"]]
    with pytest.raises(Exception, match="lb_polcy"):
        _parse({**configuration, "static_resources": {**configuration["static_resources"], "clusters": clusters}})


def test_calls_about_one_image_go_to_one_server(proxy: Proxy, configuration: dict[str, Any]) -> None:
    *_, everything = _routes(configuration, proxy.cluster)
    assert everything["match"] == {"prefix": "/"}
    assert everything["route"]["hash_policy"] == [{"header": {"header_name": proxy.header}}]
    assert _cluster(configuration, everything["route"]["cluster"])["lb_policy"] == "RING_HASH"


def test_calls_may_take_as_long_as_their_deadlines(proxy: Proxy, configuration: dict[str, Any]) -> None:
    *_, everything = _routes(configuration, proxy.cluster)
    assert everything["route"]["timeout"] == "0s"
    (manager,) = _listener(configuration, proxy.cluster)["filter_chains"][0]["filters"]
    assert manager["typed_config"]["stream_idle_timeout"] == "0s"


def test_the_servers_are_those_of_their_headless_service(
    proxy: Proxy, manifests: list[Manifest], configuration: dict[str, Any]
) -> None:
    cluster = _cluster(configuration, proxy.cluster)
    assert cluster["type"] == "STRICT_DNS"
    (endpoints,) = cluster["load_assignment"]["endpoints"]
    (endpoint,) = endpoints["lb_endpoints"]
    assert _address(endpoint["endpoint"]) == (
        proxy.service.name,
        service_port(manifests, proxy.service.name, "grpc"),
    )
    (check,) = cluster["health_checks"]
    assert check["grpc_health_check"]["service_name"] == proxy.service.full_name


def test_one_servers_health_is_not_told_as_that_of_all(proxy: Proxy, configuration: dict[str, Any]) -> None:
    health, _ = _routes(configuration, proxy.cluster)
    assert health["match"]["prefix"] == "/grpc.health.v1.Health/"
    # gRPC's UNIMPLEMENTED. Clients then stop asking and use the state of the connection.
    assert health["direct_response"] == {"status": 404}


def test_listeners_have_the_containers_ports(
    proxy: Proxy, manifests: list[Manifest], configuration: dict[str, Any]
) -> None:
    found = {one["name"]: _address(one) for one in configuration["static_resources"]["listeners"]}
    ports = container_ports(manifests, proxy.name)
    assert found == {proxy.cluster: ("0.0.0.0", ports["grpc"]), "metrics": ("0.0.0.0", ports["metrics"])}


def test_the_proxy_is_not_stopped_from_outside_the_pod(
    proxy: Proxy, manifests: list[Manifest], configuration: dict[str, Any]
) -> None:
    host, port = _address(configuration["admin"])
    assert host == "127.0.0.1"
    assert port not in container_ports(manifests, proxy.name).values()
    # The only paths that are reachable from outside.
    assert [route["match"] for route in _routes(configuration, "metrics")] == [{"path": "/metrics"}, {"path": "/ready"}]


def test_probes_ask_a_path_that_envoy_answers(proxy: Proxy, manifests: list[Manifest]) -> None:
    one = container(manifests, proxy.name)
    assert {one[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} == {"/ready"}
    assert {one[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {"metrics"}
    assert patience_s(one["livenessProbe"]) > patience_s(one["readinessProbe"])


def test_a_leaving_proxy_sends_its_clients_elsewhere_first(
    proxy: Proxy, manifests: list[Manifest], configuration: dict[str, Any]
) -> None:
    one = container(manifests, proxy.name)
    *_, script = one["lifecycle"]["preStop"]["exec"]["command"]
    assert f"/dev/tcp/127.0.0.1/{_address(configuration['admin'])[1]}" in script
    assert "POST /drain_listeners?graceful " in script
    sleep_s = int(script.rpartition("sleep ")[2])
    drain_s = int(one["args"][one["args"].index("--drain-time-s") + 1])
    assert drain_s < sleep_s < pod(manifests, proxy.name)["terminationGracePeriodSeconds"]
    assert drain_s >= one["readinessProbe"]["periodSeconds"]


def test_decoders_and_clients_are_told_the_proxys_name() -> None:
    manifests = rendered(AFFINITY)
    settings = parsed_settings(manifests, DECODER)
    assert isinstance(settings, DecoderSettings)
    namespace = find(manifests, "Service", ENCODERS.name)["metadata"]["namespace"]
    port = service_port(manifests, ENCODERS.name, "grpc")
    assert settings.encoder_target == f"dns:///{ENCODERS.name}.{namespace}:{port}"


def test_the_two_proxies_differ_in_what_is_in_front_of_them_only() -> None:
    """They are two copies, because Kustomize has no templates."""
    both = [K8S / "components" / name for name in ("affinity", "decoder-affinity")]
    for file in ("configuration.yaml", "deployment.yaml", "service.yaml", "disruption-budget.yaml"):
        encoders, decoders = ((folder / file).read_text().splitlines() for folder in both)
        assert len(encoders) == len(decoders)
        for one, other in zip(encoders, decoders, strict=True):
            if "hash_balance_factor" in one or one.lstrip().startswith("#"):
                continue
            renamed = one.replace("encoder", "decoder").replace("ENCODER", "DECODER").replace("Encoder", "Decoder")
            assert renamed.replace(ENCODERS.header, DECODERS.header) == other
