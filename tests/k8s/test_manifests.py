"""Tests that all manifests are valid for every supported Kubernetes version, and consistent with the code."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator

import kubernetes_validate
import pytest
from kubernetes_validate import utils as validator
from kubernetes_validate.utils import all_versions

import lookonce
from decoder_svc.settings import DecoderSettings
from tests.k8s.manifests import (
    CASES,
    DECODER,
    RANK,
    ServiceCase,
    container,
    container_ports,
    environment,
    find,
    names,
    of_kind,
    owner,
    parsed_settings,
    patience_s,
    pod,
    pod_labels,
    pods,
    port_of,
    selects,
    service_port,
)
from tests.k8s.render import Manifest, containers_in, containers_of, identity
from tests.k8s.variants import BASE, IMAGE_VOLUME, K8S, VARIANTS, Variant, kustomize, rendered

OLDEST_VERSION = (1, 30)
# The component model-image-volume needs it.
FIRST_WITH_IMAGE_VOLUMES = (1, 33)
# Kinds that are not part of Kubernetes; test_autoscaling.py, test_service_monitor.py, test_grpc_route.py and
# test_leader_worker_set.py test them.
CUSTOM_KINDS = {"GRPCRoute", "LeaderWorkerSet", "ScaledObject", "ServiceMonitor"}
# Secrets that operators create; the comments of the kustomizations say how.
SECRETS = {
    "lookonce-cache",
    "lookonce-encoder-tls",
    "lookonce-decoder-tls",
    "lookonce-tokens",
    "lookonce-decoder-token",
    "lookonce-admin-token",
    "lookonce-admin-tls",
    "lookonce-gateway-tls",
    "lookonce-rank-key",
}
# Time that the server waits at the end for cancelled calls to get their status; see lookonce/server/serving.py.
_FLUSH_S = 1.0
services = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# Versions that the validator knows, from the oldest that the base supports.
VERSIONS = sorted({version for version in all_versions() if _numbers(version)[:2] >= OLDEST_VERSION}, key=_numbers)


@pytest.fixture(scope="module", autouse=True)
def schemas() -> Iterator[None]:
    """Lets the validator read each schema file once; it would read all definitions of a version for each manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validator, "schema_contents", functools.cache(validator.schema_contents))
        yield


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    one: Variant = request.param
    return one


def test_every_overlay_and_component_is_among_the_variants() -> None:
    overlays = {f"overlays/{path.parent.name}" for path in K8S.glob("overlays/*/kustomization.yaml")}
    assert overlays == {variant.start for variant in VARIANTS} - {"base"}
    components = {
        str(path.parent.relative_to(K8S / "components")) for path in K8S.rglob("components/**/kustomization.yaml")
    }
    assert components == {name for variant in VARIANTS for name in variant.components}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(version: str) -> None:
    variants = [one for one in VARIANTS if one != IMAGE_VOLUME or _numbers(version)[:2] >= FIRST_WITH_IMAGE_VOLUMES]
    if kustomize() is None:
        variants = [BASE]
    # Most manifests are part of several variants.
    different = {json.dumps(one): one for variant in variants for one in rendered(variant)}
    for manifest in different.values():
        if manifest["kind"] not in CUSTOM_KINDS:
            assert kubernetes_validate.validate(manifest, version, strict=True) == version.rpartition(".")[0]


def test_the_validator_knows_the_oldest_supported_version() -> None:
    assert _numbers(VERSIONS[0])[:2] == OLDEST_VERSION


def test_the_validator_refuses_a_field_that_does_not_exist() -> None:
    broken = {**find(rendered(BASE), "Service", "lookonce-encoder"), "sepc": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_everything_is_in_the_namespace_and_has_a_name_of_its_own(manifests: list[Manifest]) -> None:
    identities = [identity(manifest) for manifest in manifests]
    assert len(set(identities)) == len(identities)
    assert {namespace for kind, namespace, _ in identities if kind != "Namespace"} == {"lookonce"}


@services
def test_the_settings_class_accepts_exactly_the_pods_environment(manifests: list[Manifest], case: ServiceCase) -> None:
    told = environment(manifests, case)
    fields = {f"LOOKONCE_{field.upper()}" for field in case.settings_class.model_fields}
    assert {key for key in told if key.startswith("LOOKONCE_")} <= fields
    settings = parsed_settings(manifests, case)
    # These are parsed values, not defaults.
    assert str(settings.model) == told["LOOKONCE_MODEL"]
    assert settings.num_threads == int(told["LOOKONCE_NUM_THREADS"])


@services
def test_pods_get_no_settings_from_service_links(manifests: list[Manifest], case: ServiceCase) -> None:
    # Kubernetes would set LOOKONCE_REDIS_PORT=tcp://… and the like, for every Service of the namespace.
    assert pod(manifests, case.name)["enableServiceLinks"] is False


@services
def test_ports_are_those_of_the_settings(manifests: list[Manifest], case: ServiceCase) -> None:
    settings = parsed_settings(manifests, case)
    expected = {
        "grpc": settings.listen,
        "metrics": settings.metrics_listen,
        "health": settings.health_listen,
        "admin": settings.admin_listen,
        "ranks": getattr(settings, "rank_listen", None),
    }
    assert container_ports(manifests, case.name) == {
        name: port_of(address) for name, address in expected.items() if address is not None
    }


@services
def test_probes_ask_the_services_health_in_plaintext(manifests: list[Manifest], case: ServiceCase) -> None:
    settings = parsed_settings(manifests, case)
    address = settings.listen if settings.tls_cert is None else settings.health_listen
    one = container(manifests, case.name)
    names = {
        "startupProbe": case.liveness_name,
        "readinessProbe": case.full_name,
        "livenessProbe": case.liveness_name,
    }
    for probe, name in names.items():
        assert one[probe]["grpc"] == {"port": port_of(address), "service": name}


@services
def test_liveness_is_more_patient_than_readiness(manifests: list[Manifest], case: ServiceCase) -> None:
    one = container(manifests, case.name)
    assert patience_s(one["livenessProbe"]) > patience_s(one["readinessProbe"])


@services
def test_the_grace_period_is_longer_than_the_drain(manifests: list[Manifest], case: ServiceCase) -> None:
    settings = parsed_settings(manifests, case)
    assert "lifecycle" not in container(manifests, case.name), "a preStop hook takes of the grace period, too"
    drain_s = settings.drain_delay_s + settings.drain_timeout_s + _FLUSH_S
    assert pod(manifests, case.name)["terminationGracePeriodSeconds"] > drain_s


@services
def test_a_leaving_pod_answers_until_it_has_been_found_unready(manifests: list[Manifest], case: ServiceCase) -> None:
    period_s = container(manifests, case.name)["readinessProbe"]["periodSeconds"]
    delay_s = parsed_settings(manifests, case).drain_delay_s
    # A single replica needs no delay: there is no other one, and its clients would have none for that time.
    is_alone = owner(manifests, case.name)["spec"].get("replicas") == 1
    assert delay_s == 0 if is_alone else delay_s >= period_s


@services
def test_the_container_runs_the_service(manifests: list[Manifest], case: ServiceCase) -> None:
    assert container(manifests, case.name)["command"] == ["python", "-m", case.module]
    assert (K8S.parent / case.module / "__main__.py").is_file()


@services
def test_tensor_threads_fit_into_the_requested_cpus(manifests: list[Manifest], case: ServiceCase) -> None:
    requested = container(manifests, case.name)["resources"]["requests"]["cpu"]
    assert parsed_settings(manifests, case).num_threads == int(requested)


@services
def test_the_model_is_mounted_read_only_where_the_settings_look(manifests: list[Manifest], case: ServiceCase) -> None:
    (mount,) = (mount for mount in container(manifests, case.name)["volumeMounts"] if mount["name"] == "model")
    (volume,) = (volume for volume in pod(manifests, case.name)["volumes"] if volume["name"] == "model")
    assert mount["mountPath"] == str(parsed_settings(manifests, case).model)
    assert mount["readOnly"]
    claims = names(manifests, "PersistentVolumeClaim") - {"lookonce-adapters"}
    assert claims == ({volume["persistentVolumeClaim"]["claimName"]} if "persistentVolumeClaim" in volume else set())
    # Exactly one source; test_model_delivery.py tests the others.
    assert len(volume) == 2


@services
def test_files_of_the_settings_lie_in_mounted_secrets(manifests: list[Manifest], case: ServiceCase) -> None:
    mounts = {mount["mountPath"]: mount for mount in container(manifests, case.name)["volumeMounts"]}
    settings = parsed_settings(manifests, case)
    for field in sorted(settings.model_fields_set):
        if field.endswith("_file") or "_tls_" in field or field.startswith("tls_"):
            assert mounts[str(getattr(settings, field).parent)]["readOnly"], field


@services
def test_grpc_services_are_headless(manifests: list[Manifest], case: ServiceCase) -> None:
    assert find(manifests, "Service", case.name)["spec"]["clusterIP"] == "None"


def test_the_decoder_finds_encoder_and_cache_by_their_services(manifests: list[Manifest]) -> None:
    encoder, decoder = (parsed_settings(manifests, case) for case in CASES)
    assert isinstance(decoder, DecoderSettings)
    assert decoder.encoder_target is not None
    # Clients in other namespaces get this name, too.
    name, _, namespace = decoder.encoder_target.removeprefix("dns:///").partition(":")[0].partition(".")
    assert namespace == find(manifests, "Service", name)["metadata"]["namespace"]
    assert decoder.encoder_target == f"dns:///{name}.{namespace}:{service_port(manifests, name, 'grpc')}"
    assert name == (
        "lookonce-encoder-affinity"
        if name in names(manifests, "Service") - {"lookonce-encoder"}
        else "lookonce-encoder"
    )
    if "lookonce-redis" in names(manifests, "Service"):
        cache_url = f"redis://lookonce-redis:{service_port(manifests, 'lookonce-redis', 'redis')}"
        urls = [one.redis_url for one in (encoder, decoder) if one.redis_url is not None]
        assert [url.get_secret_value() for url in urls] == [cache_url, cache_url]


def test_services_lead_to_named_ports_of_their_pods(manifests: list[Manifest]) -> None:
    for service in of_kind(manifests, "Service"):
        name = service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= pod_labels(manifests)[name].items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(container_ports(manifests, name))


def test_selectors_meet_the_pods_they_mean_and_no_others(manifests: list[Manifest]) -> None:
    labels = pod_labels(manifests)
    budgets = of_kind(manifests, "PodDisruptionBudget")
    assert names(budgets, "PodDisruptionBudget") == set(labels) - {"lookonce-redis", RANK}
    # A decoder with its ranks, if the model is split. They are spread together, and the eviction of one ends all.
    group = {DECODER.name, RANK} & set(labels)
    selecting = [(one["metadata"]["name"], one["spec"]["selector"], False) for one in of_kind(manifests, "Deployment")]
    for one in budgets:
        name = one["metadata"]["name"]
        selecting.append((name, one["spec"]["selector"], name == DECODER.name))
    for name, one in pods(manifests).items():
        for rule in one.get("topologySpreadConstraints", []):
            selecting.append((name, rule["labelSelector"], "matchLabelKeys" in rule))
    for name, selector, is_of_group in selecting:
        found = {each for each in labels if selects(selector, labels[each])}
        assert found == (group if is_of_group else {name})


def test_only_the_services_reach_the_cache() -> None:
    manifests = rendered(BASE)
    labels = pod_labels(manifests)
    policy = find(manifests, "NetworkPolicy", "lookonce-redis")["spec"]
    assert [name for name in labels if selects(policy["podSelector"], labels[name])] == ["lookonce-redis"]
    (rule,) = policy["ingress"]
    ((kind, peer),) = rule["from"][0].items()
    assert kind == "podSelector"
    assert {name for name in labels if selects(peer, labels[name])} == {case.name for case in CASES}


def test_pods_have_the_least_rights(manifests: list[Manifest]) -> None:
    users = set()
    for one in pods(manifests).values():
        assert one["automountServiceAccountToken"] is False
        assert one["securityContext"]["runAsNonRoot"] is True
        assert one["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        users.add(one["securityContext"]["runAsUser"])
        for each in containers_in(one):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    assert users <= {10001, 10002, 10003}


def test_containers_state_their_resources(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        for each in containers_of(manifest):
            requests, limits = each["resources"]["requests"], dict(each["resources"]["limits"])
            assert set(requests) == {"cpu", "memory"}
            limits.pop("nvidia.com/gpu", None)
            # A pod with a limit above its request is the first to be killed when a node runs out of memory.
            assert limits == {"memory": requests["memory"]}


def test_volumes_config_maps_and_secrets_exist(manifests: list[Manifest]) -> None:
    config_maps = names(manifests, "ConfigMap")
    for one in pods(manifests).values():
        volumes = {volume["name"] for volume in one["volumes"]}
        assert {mount["name"] for each in containers_in(one) for mount in each["volumeMounts"]} == volumes
        assert {volume["configMap"]["name"] for volume in one["volumes"] if "configMap" in volume} <= config_maps
        assert set(_secrets(one)) <= SECRETS


def test_no_secret_is_committed(manifests: list[Manifest]) -> None:
    assert not names(manifests, "Secret")
    for manifest in of_kind(manifests, "ConfigMap"):
        for key, value in manifest["data"].items():
            assert not re.search(r"://[^/\s]*:[^/\s]*@", value), f"{key} has a password in its URL"
            assert not re.search(r"\b[0-9a-f]{64}\b|PRIVATE KEY|^requirepass|^user ", value, re.MULTILINE), key


def test_images_are_pinned(variant: Variant, manifests: list[Manifest]) -> None:
    images = {each["image"] for manifest in manifests for each in containers_of(manifest)}
    assert all(re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+(-cu\d+)?", image) for image in images)
    suffix = "-cu130" if variant.start == "overlays/gpu" else ""
    assert {f"{case.name}:{lookonce.__version__}{suffix}" for case in CASES} <= images


def _secrets(one: Manifest) -> list[str]:
    """Returns the names of the Secrets that a pod needs."""
    volumes = [volume["secret"]["secretName"] for volume in one["volumes"] if "secret" in volume]
    projected = [source for volume in one["volumes"] for source in volume.get("projected", {}).get("sources", [])]
    sources = [variable.get("valueFrom", {}) for each in one["containers"] for variable in each.get("env", [])]
    return [
        *volumes,
        *(source["secret"]["name"] for source in projected),
        *(source["secretKeyRef"]["name"] for source in sources if "secretKeyRef" in source),
    ]
