"""Tests of the components that take the model from an OCI image, and of images by digest."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.k8s.manifests import CASES, ServiceCase, container, names, parsed_settings, pod
from tests.k8s.render import containers_of
from tests.k8s.variants import (
    IMAGE_VOLUME,
    INIT_CONTAINER,
    K8S,
    PROD,
    Variant,
    build,
    rendered,
    skip_without_tool,
    write_overlay,
)

_DIGEST = "sha256:" + "0123456789abcdef" * 4
CASE_NAMES = tuple(case.name for case in CASES)
services = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.parametrize("variant", [IMAGE_VOLUME, INIT_CONTAINER], ids=str)
def test_there_is_no_claim_to_fill(variant: Variant) -> None:
    assert not names(rendered(variant), "PersistentVolumeClaim")


@services
def test_the_image_volume_is_the_model_image(case: ServiceCase) -> None:
    one = pod(rendered(IMAGE_VOLUME), case.name)
    (volume,) = (volume for volume in one["volumes"] if volume["name"] == "model")
    assert volume["image"] == {"reference": "lookonce-model:1.0.0", "pullPolicy": "IfNotPresent"}


@services
def test_the_init_container_copies_the_model_to_where_the_service_reads_it(case: ServiceCase) -> None:
    manifests = rendered(INIT_CONTAINER)
    one = pod(manifests, case.name)
    (init,) = one["initContainers"]
    (mount,) = init["volumeMounts"]
    (read,) = (each for each in container(manifests, case.name)["volumeMounts"] if each["name"] == mount["name"])
    assert read["mountPath"] == str(parsed_settings(manifests, case).model)
    assert init["command"][-1] == mount["mountPath"]
    assert "readOnly" not in mount
    # The volume is the pod's own; its group may write to it.
    (volume,) = (each for each in one["volumes"] if each["name"] == mount["name"])
    assert set(volume["emptyDir"]) == {"sizeLimit"}
    assert one["securityContext"]["fsGroup"] == one["securityContext"]["runAsUser"]
    text = (K8S / "components/model-init-container/kustomization.yaml").read_text("utf-8")
    assert f" . {init['command'][-2].removesuffix('/.')}\\n" in text


@pytest.mark.parametrize("component", ["model-image-volume", "model-init-container"])
def test_every_image_may_be_given_by_its_digest(component: str, tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    images = [
        {"name": name, "newName": f"registry.example/{name}", "digest": _DIGEST}
        for name in (*CASE_NAMES, "lookonce-model")
    ]
    write_overlay(tmp_path, Variant(PROD.start, (component,)), images=images)
    manifests = build(tmp_path)
    found = {each["image"] for manifest in manifests for each in containers_of(manifest)}
    for case in CASES:
        volumes = pod(manifests, case.name)["volumes"]
        found |= {volume["image"]["reference"] for volume in volumes if "image" in volume}
    assert found == {f"registry.example/{name}@{_DIGEST}" for name in (*CASE_NAMES, "lookonce-model")}


def test_prods_comment_shows_the_digest_of_each_service_image() -> None:
    text = (K8S / "overlays/prod-external-redis/kustomization.yaml").read_text("utf-8")
    shown = re.findall(r"^# +- name: (\S+)\n# +newName: \S+\n# +digest: sha256:", text, re.MULTILINE)
    assert shown == list(CASE_NAMES)
