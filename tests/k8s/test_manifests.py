"""The rendered base: valid for every supported Kubernetes version, and consistent with the code it runs."""

from __future__ import annotations

import os
import pathlib
import re
from dataclasses import dataclass
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_validate.utils import all_versions

import lookonce
from decoder_svc.settings import DecoderSettings
from encoder_svc.settings import EncoderSettings
from lookonce.decoder.v1 import decoder_service_pb2
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.settings import ServiceSettings, parse_settings
from tests.k8s.render import Manifest, containers_of, render

BASE = pathlib.Path(__file__).parents[2] / "k8s/base"
OLDEST_VERSION = (1, 30)
_APP = "app.kubernetes.io/name"
# How long the shell still waits for expelled calls to hear their status; see lookonce/serving.py.
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class ServiceCase:
    """One gRPC service and what its manifests must agree with."""

    name: str
    settings_class: type[ServiceSettings]
    # As in the proto file.
    full_name: str
    # What `python -m` runs.
    module: str


CASES = (
    ServiceCase(
        "lookonce-encoder",
        EncoderSettings,
        encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name,
        "encoder_svc",
    ),
    ServiceCase(
        "lookonce-decoder",
        DecoderSettings,
        decoder_service_pb2.DESCRIPTOR.services_by_name["DecoderService"].full_name,
        "decoder_svc",
    ),
)
services = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# What the validator knows, from the oldest version on that the base supports.
VERSIONS = [version for version in all_versions() if _numbers(version)[:2] >= OLDEST_VERSION]


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(BASE)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version.rpartition(".")[0]


def test_the_validator_knows_the_oldest_supported_version() -> None:
    assert _numbers(VERSIONS[0])[:2] == OLDEST_VERSION


def test_the_validator_refuses_a_field_that_does_not_exist(manifests: list[Manifest]) -> None:
    broken = {**_find(manifests, "Service", "lookonce-encoder"), "sepc": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@services
def test_the_settings_class_accepts_exactly_the_pods_environment(
    manifests: list[Manifest], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = _environment(manifests, case)
    fields = {f"LOOKONCE_{field.upper()}" for field in case.settings_class.model_fields}
    assert {key for key in environment if key.startswith("LOOKONCE_")} <= fields
    settings = _settings(manifests, case, monkeypatch)
    # Parsed values, not defaults.
    assert settings.insecure
    assert str(settings.model) == environment["LOOKONCE_MODEL"]


@services
def test_pods_get_no_settings_from_service_links(manifests: list[Manifest], case: ServiceCase) -> None:
    # Kubernetes would set LOOKONCE_REDIS_PORT=tcp://… and the like, for every Service of the namespace.
    assert _pod(manifests, case.name)["enableServiceLinks"] is False


@services
def test_ports_are_those_of_the_settings(
    manifests: list[Manifest], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(manifests, case, monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in _container(manifests, case.name)["ports"]}
    assert settings.metrics_listen is not None
    assert ports == {"grpc": _port(settings.listen), "metrics": _port(settings.metrics_listen)}


@services
def test_probes_ask_the_services_health(
    manifests: list[Manifest], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"port": _port(_settings(manifests, case, monkeypatch).listen), "service": case.full_name}
    container = _container(manifests, case.name)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"] == expected


@services
def test_liveness_is_more_patient_than_readiness(manifests: list[Manifest], case: ServiceCase) -> None:
    container = _container(manifests, case.name)
    assert _patience_s(container["livenessProbe"]) > _patience_s(container["readinessProbe"])


@services
def test_the_grace_period_is_longer_than_the_drain(
    manifests: list[Manifest], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(manifests, case, monkeypatch)
    drain_s = settings.drain_delay_s + settings.drain_timeout_s + _FLUSH_S
    assert _pod(manifests, case.name)["terminationGracePeriodSeconds"] > drain_s


@services
def test_a_leaving_pod_answers_until_it_has_been_found_unready(
    manifests: list[Manifest], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    period_s = _container(manifests, case.name)["readinessProbe"]["periodSeconds"]
    assert _settings(manifests, case, monkeypatch).drain_delay_s >= period_s


@services
def test_the_container_runs_the_service(manifests: list[Manifest], case: ServiceCase) -> None:
    assert _container(manifests, case.name)["command"] == ["python", "-m", case.module]
    assert (BASE.parents[1] / case.module / "__main__.py").is_file()


@services
def test_tensor_threads_fit_into_the_requested_cpus(
    manifests: list[Manifest], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = _container(manifests, case.name)["resources"]["requests"]["cpu"]
    assert _settings(manifests, case, monkeypatch).num_threads == int(requested)


@services
def test_the_model_is_mounted_read_only_where_the_settings_look(
    manifests: list[Manifest], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    container, pod = _container(manifests, case.name), _pod(manifests, case.name)
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "model")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "model")
    assert mount["mountPath"] == str(_settings(manifests, case, monkeypatch).model)
    assert mount["readOnly"]
    _find(manifests, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


@services
def test_grpc_services_are_headless(manifests: list[Manifest], case: ServiceCase) -> None:
    assert _find(manifests, "Service", case.name)["spec"]["clusterIP"] == "None"


def test_the_decoder_finds_encoder_and_cache_by_their_services(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, decoder = (_settings(manifests, case, monkeypatch) for case in CASES)
    assert isinstance(decoder, DecoderSettings)
    assert decoder.encoder_target == f"dns:///lookonce-encoder:{_service_port(manifests, 'lookonce-encoder', 'grpc')}"
    cache_url = f"redis://lookonce-redis:{_service_port(manifests, 'lookonce-redis', 'redis')}"
    for settings in (encoder, decoder):
        assert settings.redis_url is not None
        assert settings.redis_url.get_secret_value() == cache_url


def test_services_lead_to_named_ports_of_their_pods(manifests: list[Manifest]) -> None:
    for service in _of_kind(manifests, "Service"):
        deployment = _find(manifests, "Deployment", service["metadata"]["name"])
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        names = {port["name"] for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_selectors_meet_the_pods_they_mean_and_no_others(manifests: list[Manifest]) -> None:
    deployments = _of_kind(manifests, "Deployment")
    selecting = [*deployments, *_of_kind(manifests, "PodDisruptionBudget")]
    for manifest in selecting:
        wanted = manifest["spec"]["selector"]["matchLabels"].items()
        found = [
            deployment["metadata"]["name"]
            for deployment in deployments
            if wanted <= deployment["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert found == [manifest["metadata"]["name"]]


def test_only_the_services_reach_the_cache(manifests: list[Manifest]) -> None:
    policy = _find(manifests, "NetworkPolicy", "lookonce-redis")["spec"]
    assert policy["podSelector"]["matchLabels"] == {_APP: "lookonce-redis"}
    (rule,) = policy["ingress"]
    ((_, peer),) = rule["from"][0].items()
    (expression,) = peer["matchExpressions"]
    assert (expression["key"], expression["operator"]) == (_APP, "In")
    assert set(expression["values"]) == {case.name for case in CASES}


def test_pods_have_the_least_rights(manifests: list[Manifest]) -> None:
    for deployment in _of_kind(manifests, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers_of(deployment):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_containers_say_what_they_need(manifests: list[Manifest]) -> None:
    for deployment in _of_kind(manifests, "Deployment"):
        for container in containers_of(deployment):
            resources = container["resources"]
            assert set(resources["requests"]) == {"cpu", "memory"}
            # A pod that may use more than it asked for is the first to be killed when a node runs out.
            assert resources["limits"] == {"memory": resources["requests"]["memory"]}


def test_volumes_and_config_maps_exist(manifests: list[Manifest]) -> None:
    names = {manifest["metadata"]["name"] for manifest in _of_kind(manifests, "ConfigMap")}
    for deployment in _of_kind(manifests, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounts == volumes
        assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} <= names


def test_images_are_pinned(manifests: list[Manifest]) -> None:
    images = {container["image"] for manifest in manifests for container in containers_of(manifest)}
    assert all(re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+", image) for image in images)
    assert f"lookonce:{lookonce.__version__}" in images


def _find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (manifest,) = (one for one in _of_kind(manifests, kind) if one["metadata"]["name"] == name)
    return manifest


def _of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    assert found, f"the base has no {kind}"
    return found


def _pod(manifests: list[Manifest], name: str) -> Manifest:
    pod: Manifest = _find(manifests, "Deployment", name)["spec"]["template"]["spec"]
    return pod


def _container(manifests: list[Manifest], name: str) -> Manifest:
    (container,) = _pod(manifests, name)["containers"]
    found: Manifest = container
    return found


def _environment(manifests: list[Manifest], case: ServiceCase) -> dict[str, str]:
    """What the container's process sees of its manifests."""
    container = _container(manifests, case.name)
    environment: dict[str, str] = {}
    for source in container["envFrom"]:
        environment |= _find(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    return environment | {variable["name"]: variable["value"] for variable in container["env"]}


def _settings(manifests: list[Manifest], case: ServiceCase, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that the service would parse in its pod."""
    for key in [key for key in os.environ if key.startswith("LOOKONCE_")]:
        monkeypatch.delenv(key)
    for key, value in _environment(manifests, case).items():
        monkeypatch.setenv(key, value)
    return parse_settings(case.settings_class, [], case.module)


def _patience_s(probe: dict[str, Any]) -> int:
    """How long a probe fails before Kubernetes acts; 3 failures are its default."""
    patience_s: int = probe["periodSeconds"] * probe.get("failureThreshold", 3)
    return patience_s


def _service_port(manifests: list[Manifest], name: str, port_name: str) -> int:
    ports = _find(manifests, "Service", name)["spec"]["ports"]
    (port,) = (port["port"] for port in ports if port["name"] == port_name)
    return int(port)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
