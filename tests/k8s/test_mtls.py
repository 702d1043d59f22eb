"""Tests of the component mtls: certificates on every connection, and probes that need none."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.k8s.manifests import (
    CASES,
    DECODER,
    ENCODER,
    ServiceCase,
    container,
    container_ports,
    environment,
    find,
    parsed_settings,
    pod,
)
from tests.k8s.render import Manifest
from tests.k8s.variants import K8S, MTLS, PROD_ALL, VARIANTS, Variant, rendered

# Keys of a Secret that cert-manager creates.
_FILES = {"tls.crt", "tls.key", "ca.crt"}
services = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(params=[MTLS, PROD_ALL], ids=str)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    variant: Variant = request.param
    return rendered(variant)


@services
def test_clients_without_a_certificate_are_refused(manifests: list[Manifest], case: ServiceCase) -> None:
    settings = parsed_settings(manifests, case)
    assert not settings.insecure
    for path in (settings.tls_cert, settings.tls_key, settings.tls_client_ca):
        assert path is not None


def test_the_decoder_shows_the_encoder_a_certificate(manifests: list[Manifest]) -> None:
    settings = parsed_settings(manifests, DECODER)
    assert settings.encoder_tls_cert == settings.tls_cert
    assert settings.encoder_tls_key == settings.tls_key
    assert settings.encoder_tls_ca is not None


@services
def test_all_files_are_keys_of_one_secret_that_may_change_in_a_running_pod(
    manifests: list[Manifest], case: ServiceCase
) -> None:
    settings = parsed_settings(manifests, case)
    fields = [field for field in settings.model_fields_set if "tls_" in field]
    paths = {pathlib.PurePath(getattr(settings, field)) for field in fields}
    assert {path.name for path in paths} == _FILES
    (folder,) = {str(path.parent) for path in paths}
    (mount,) = (one for one in container(manifests, case.name)["volumeMounts"] if one["mountPath"] == folder)
    # With a subPath, the kubelet would never update a certificate.
    assert set(mount) == {"name", "mountPath", "readOnly"}
    (volume,) = (one for one in pod(manifests, case.name)["volumes"] if one["name"] == mount["name"])
    assert volume["secret"]["secretName"] == f"{case.name}-tls"
    # The user of the container does not own the files.
    assert volume["secret"]["defaultMode"] == 0o444


@services
def test_probes_reach_a_port_that_no_service_leads_to(manifests: list[Manifest], case: ServiceCase) -> None:
    assert container_ports(manifests, case.name)["health"] not in {
        port["port"] for port in find(manifests, "Service", case.name)["spec"]["ports"]
    }
    # The kubelet connects from the node to the pod's address.
    assert environment(manifests, case)["LOOKONCE_HEALTH_LISTEN"].startswith("0.0.0.0:")


def test_the_proposed_certificate_has_the_name_that_decoders_call() -> None:
    text = (K8S / "components/mtls/kustomization.yaml").read_text("utf-8")
    (listed,) = re.findall(r"dnsNames: \[(.*)\]", text)
    target = parsed_settings(rendered(MTLS), DECODER).encoder_target
    assert target.removeprefix("dns:///").partition(":")[0] in listed.split(", ")
    assert f"secretName: {ENCODER.name}-tls" in text


def test_envoy_without_certificates_is_not_put_between() -> None:
    for variant in VARIANTS:
        assert not ("mtls" in variant.components and {"affinity", "decoder-affinity"} & set(variant.components))
