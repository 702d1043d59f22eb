"""Tests of the component gateway: its pods call the decoders of their instance, and finish answers when they end."""

from __future__ import annotations

import os

import pytest

from gateway_svc.settings import GatewaySettings
from lookonce.server.settings_parser import parse_settings
from tests.k8s.manifests import container, container_ports, find, pod, port_of, service_port, variables
from tests.k8s.render import Manifest
from tests.k8s.variants import GATEWAY, PROD_ALL, Variant, rendered

NAME = "lookonce-gateway"


@pytest.fixture(params=[GATEWAY, PROD_ALL], ids=str)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    variant: Variant = request.param
    return rendered(variant)


@pytest.fixture
def settings(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    """The settings that the gateway parses in its pod."""
    one = container(manifests, NAME)
    namespace = find(manifests, "Deployment", NAME)["metadata"]["namespace"]
    data = find(manifests, "ConfigMap", NAME)["data"]
    for key in [key for key in os.environ if key.startswith("LOOKONCE_")]:
        monkeypatch.delenv(key)
    for key, value in {**data, **variables(one, namespace)}.items():
        monkeypatch.setenv(key, value)
    return parse_settings(GatewaySettings, [], "gateway_svc")


def test_it_calls_the_decoders_service(manifests: list[Manifest], settings: GatewaySettings) -> None:
    namespace = find(manifests, "Deployment", NAME)["metadata"]["namespace"]
    port = service_port(manifests, "lookonce-decoder", "grpc")
    assert settings.decoder_target == f"dns:///lookonce-decoder.{namespace}:{port}"
    assert container(manifests, NAME)["image"] == container(manifests, "lookonce-decoder")["image"]


def test_ports_are_those_of_the_service(manifests: list[Manifest], settings: GatewaySettings) -> None:
    ports = container_ports(manifests, NAME)
    assert ports == {"http": port_of(settings.listen), "metrics": port_of(str(settings.metrics_listen))}
    assert service_port(manifests, NAME, "http") == ports["http"]


def test_keys_travel_over_tls_where_decoders_ask_for_it(manifests: list[Manifest], settings: GatewaySettings) -> None:
    has_tls = "LOOKONCE_TLS_CERT" in find(manifests, "ConfigMap", "lookonce-decoder")["data"]
    assert settings.token_over_plaintext is not has_tls
    assert (settings.decoder_tls_ca is not None) is has_tls
    if has_tls:
        (mount,) = [one for one in container(manifests, NAME)["volumeMounts"] if one["name"] == "tls"]
        assert str(settings.decoder_tls_key).startswith(mount["mountPath"])


def test_a_pod_has_time_to_finish_answers(manifests: list[Manifest], settings: GatewaySettings) -> None:
    grace_s = pod(manifests, NAME)["terminationGracePeriodSeconds"]
    assert grace_s >= settings.drain_delay_s + settings.drain_timeout_s + 5
    probe = container(manifests, NAME)["readinessProbe"]
    assert probe["httpGet"] == {"path": "/health", "port": "http"}


def test_buffers_fit_into_the_pod(manifests: list[Manifest], settings: GatewaySettings) -> None:
    limit = container(manifests, NAME)["resources"]["limits"]["memory"]
    assert limit == "1Gi"
    assert settings.max_buffered_bytes * 2 <= 1 << 30
