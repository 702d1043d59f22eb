"""Tests of the promises of single overlays; test_manifests.py has those of all variants."""

from __future__ import annotations

import pathlib
import re

import pytest

from decoder_svc.settings import DecoderSettings
from lookonce.store.redis.url import DeploymentKind, parse_redis_url
from tests.k8s.manifests import (
    CASES,
    DECODER,
    FROM_SECRET,
    ServiceCase,
    container,
    environment,
    find,
    names,
    of_kind,
    parsed_settings,
    pod,
)
from tests.k8s.render import Manifest, containers_of
from tests.k8s.variants import (
    BASE,
    DEV_CPU,
    GPU,
    K8S,
    PROD,
    build,
    proposed_patches,
    rendered,
    skip_without_tool,
    write_overlay,
)

_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "mb": 1 << 20, "gb": 1 << 30}
# Fragmentation and client buffers need memory in addition to the entries.
_MEMORY_FACTOR = 1.25
services = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def size_bytes(text: str) -> int:
    """Returns the bytes of a size as Kubernetes or the cache server spells it."""
    return int(text[:-2]) * _UNITS[text[-2:]]


def requested(manifests: list[Manifest], resource: str) -> float:
    """Returns the sum of a requested resource over all pods."""
    total = 0.0
    for deployment in of_kind(manifests, "Deployment"):
        for one in containers_of(deployment):
            text = one["resources"]["requests"][resource]
            each = (
                size_bytes(text) if text.endswith("i") else float(text.removesuffix("m")) / (1000 if "m" in text else 1)
            )
            total += each * deployment["spec"]["replicas"]
    return total


def test_dev_cpu_fits_on_a_laptop() -> None:
    manifests = rendered(DEV_CPU)
    assert {one["spec"]["replicas"] for one in of_kind(manifests, "Deployment")} == {1}
    assert requested(manifests, "cpu") <= 3
    assert requested(manifests, "memory") <= 5 << 30
    (claim,) = of_kind(manifests, "PersistentVolumeClaim")
    # The access mode that the storage class of a cluster with one node offers.
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_the_demo_model_fits_into_dev_cpus_claim() -> None:
    (claim,) = of_kind(rendered(DEV_CPU), "PersistentVolumeClaim")
    files = [path for path in (K8S.parent / "models/demo").iterdir() if path.is_file()]
    assert files
    assert sum(path.stat().st_size for path in files) < size_bytes(claim["spec"]["resources"]["requests"]["storage"])


def test_dev_cpus_cache_differs_from_the_bases_in_size_alone() -> None:
    def settings(manifests: list[Manifest]) -> dict[str, str]:
        lines = find(manifests, "ConfigMap", "lookonce-redis")["data"]["valkey.conf"].splitlines()
        return dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))

    ours, base = settings(rendered(DEV_CPU)), settings(rendered(BASE))
    assert {key for key in ours | base if ours.get(key) != base.get(key)} == {"maxmemory"}
    limit = container(rendered(DEV_CPU), "lookonce-redis")["resources"]["limits"]["memory"]
    assert size_bytes(limit) >= _MEMORY_FACTOR * size_bytes(ours["maxmemory"])


@services
def test_gpu_pods_have_one_gpu_each_and_use_it(case: ServiceCase) -> None:
    manifests = rendered(GPU)
    assert container(manifests, case.name)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert parsed_settings(manifests, case).device == "cuda"
    assert pod(manifests, case.name)["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_the_proposed_patches_split_a_model_over_the_gpus_of_a_pod(tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    patches = proposed_patches(K8S / "overlays/gpu/kustomization.yaml", indent=3)
    write_overlay(tmp_path, GPU, patches=patches)
    manifests = build(tmp_path)
    settings = parsed_settings(manifests, DECODER)
    assert isinstance(settings, DecoderSettings)
    one = container(manifests, DECODER.name)
    assert one["resources"]["limits"]["nvidia.com/gpu"] == settings.tensor_parallel_size == 2
    # NCCL needs more than the 64 MiB that a container has by default.
    (mount,) = (each for each in one["volumeMounts"] if each["mountPath"] == "/dev/shm")
    (volume,) = (each for each in pod(manifests, DECODER.name)["volumes"] if each["name"] == mount["name"])
    assert volume["emptyDir"]["medium"] == "Memory"
    assert size_bytes(volume["emptyDir"]["sizeLimit"]) > 64 << 20


@services
def test_a_roll_out_on_gpus_wants_no_spare_one(case: ServiceCase) -> None:
    deployment = find(rendered(GPU), "Deployment", case.name)["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert deployment["replicas"] > 1


def test_the_cache_takes_no_gpu() -> None:
    assert "nvidia.com/gpu" not in container(rendered(GPU), "lookonce-redis")["resources"]["limits"]


def test_prod_has_no_cache_of_its_own() -> None:
    manifests = rendered(PROD)
    for kind in ("Deployment", "Service", "ConfigMap", "NetworkPolicy"):
        assert "lookonce-redis" not in names(manifests, kind)


@services
def test_prod_takes_address_and_keys_of_the_cache_from_the_secret(case: ServiceCase) -> None:
    manifests = rendered(PROD)
    assert "LOOKONCE_REDIS_URL" not in find(manifests, "ConfigMap", case.name)["data"]
    assert environment(manifests, case)["LOOKONCE_REDIS_URL"] == FROM_SECRET["LOOKONCE_REDIS_URL"]
    (volume,) = (one for one in pod(manifests, case.name)["volumes"] if "projected" in one)
    (mount,) = (one for one in container(manifests, case.name)["volumeMounts"] if one["name"] == volume["name"])
    files = {
        f"{mount['mountPath']}/{item['path']}": source["secret"].get("optional", False)
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    settings = parsed_settings(manifests, case)
    assert not files[str(settings.seal_key_file)]
    assert not files[str(settings.tenant_secret_file)]
    # A public authority's certificate needs no file.
    assert files[f"{mount['mountPath']}/ca.crt"]


def test_the_urls_that_prods_comment_proposes_are_understood() -> None:
    text = (K8S / "overlays/prod-external-redis/kustomization.yaml").read_text("utf-8")
    urls = re.findall(r"rediss(?:\+\w+)?://\S+", text)
    option = re.findall(r"\?ssl_ca_certs=\S+", text)
    assert len(option) == 1
    kinds = [parse_redis_url(url + tail).kind for url in urls for tail in ("", option[0])]
    assert set(kinds) == set(DeploymentKind)


def test_the_command_in_prods_comment_makes_every_key_that_pods_want() -> None:
    text = (K8S / "overlays/prod-external-redis/kustomization.yaml").read_text("utf-8")
    made = set(re.findall(r"--from-file=(\S+)", text))
    wanted = set()
    for name in ("lookonce-encoder", "lookonce-decoder"):
        one = pod(rendered(PROD), name)
        urls = [
            variable["valueFrom"]["secretKeyRef"]["key"]
            for variable in one["containers"][0]["env"]
            if "secretKeyRef" in variable.get("valueFrom", {})
        ]
        # Each service has its own user, because decoders may not write rows.
        assert urls == [f"{name.removeprefix('lookonce-')}-redis-url"]
        wanted |= set(urls)
        for volume in one["volumes"]:
            for source in volume.get("projected", {}).get("sources", []):
                wanted |= {item["key"] for item in source["secret"]["items"]}
    assert made == wanted
