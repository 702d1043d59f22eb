"""Tests that an overlay with another namespace or a name suffix is a complete second instance.

Two instances are rendered side by side. No object of one may refer to an object of the other.
"""

from __future__ import annotations

import copy
import functools
import json
import pathlib
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.k8s.manifests import find, names, pod_labels
from tests.k8s.references import references
from tests.k8s.render import Manifest, identity
from tests.k8s.variants import (
    BASE,
    GPU_ALL,
    GRPC_ROUTE,
    HPA,
    K8S,
    LEADER_WORKER_SET,
    PROD_ALL,
    VARIANTS,
    Variant,
    build,
    relative,
    skip_without_tool,
    write_overlay,
)


@pytest.fixture(autouse=True)
def real_tool() -> None:
    """Skips all tests of this module without kustomize."""
    skip_without_tool()


@dataclass(frozen=True, slots=True)
class Instance:
    """The fields of a user's kustomization that distinguish one instance."""

    namespace: str | None = None
    name_suffix: str = ""
    name_prefix: str = ""

    def __str__(self) -> str:
        return f"{self.name_prefix}lookonce{self.name_suffix}.{self.namespace or 'lookonce'}"

    def fields(self, folder: pathlib.Path, variant: Variant) -> dict[str, object]:
        """Returns the fields of the kustomization in this folder."""
        named = {"namespace": self.namespace, "nameSuffix": self.name_suffix, "namePrefix": self.name_prefix}
        fields: dict[str, object] = {key: value for key, value in named.items() if value}
        if "keda" in variant.components and fields:
            fields["transformers"] = [relative(folder, "transformers/keda")]
        return fields


FIRST = Instance()
BOTH_FIELDS = Instance("other", "-b")
OTHERS = (
    Instance(name_suffix="-b"),
    Instance(namespace="other"),
    BOTH_FIELDS,
    Instance(name_suffix="-2"),
    Instance(name_prefix="new-"),
)


@functools.cache
def build_instance(variant: Variant, instance: Instance) -> list[Manifest]:
    """Returns the manifests of an instance, which must not be changed."""
    if instance.namespace is None and instance != FIRST and "revision" not in variant.components:
        variant = replace(variant, components=(*variant.components, "revision"))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_overlay(folder, variant, **instance.fields(folder, variant))
        return build(folder)


# Each variant with both fields at once and with one of the other instances in turn; rendering all pairs takes long.
PAIRS = [
    (variant, instance)
    for number, variant in enumerate(VARIANTS)
    for instance in dict.fromkeys((BOTH_FIELDS, OTHERS[number % len(OTHERS)]))
]
each_pair = pytest.mark.parametrize(("variant", "instance"), PAIRS, ids=str)


@each_pair
def test_no_object_of_an_instance_refers_to_the_other_instance(variant: Variant, instance: Instance) -> None:
    first, second = build_instance(variant, FIRST), build_instance(variant, instance)
    assert references(second, first) == []
    assert references(first, second) == []


@each_pair
def test_two_instances_have_no_object_in_common_and_lack_none(variant: Variant, instance: Instance) -> None:
    first, second = build_instance(variant, FIRST), build_instance(variant, instance)
    assert {identity(one) for one in first} & {identity(one) for one in second} == set()
    expected = sorted(
        (kind, instance.namespace or namespace, f"{instance.name_prefix}{name}{instance.name_suffix}")
        for kind, namespace, name in map(identity, first)
        if kind != "Namespace"
    )
    assert sorted(identity(one) for one in second if one["kind"] != "Namespace") == expected
    namespaces = [identity(one) for one in second if one["kind"] == "Namespace"]
    has_namespace = instance.namespace is not None and "revision" not in variant.components
    assert namespaces == ([("Namespace", "", instance.namespace)] if has_namespace else [])


@each_pair
def test_selectors_of_a_second_instance_meet_as_many_of_its_objects(variant: Variant, instance: Instance) -> None:
    def met(manifests: list[Manifest]) -> int:
        return len([one for one in references(manifests, manifests) if " selects " in one])

    assert met(build_instance(variant, instance)) == met(build_instance(variant, FIRST)) > 0


def test_one_build_may_contain_several_instances(tmp_path: pathlib.Path) -> None:
    instances = (FIRST, *OTHERS)
    for number, instance in enumerate(instances):
        folder = tmp_path / str(number)
        folder.mkdir()
        one = GPU_ALL
        if (instance.namespace is None and instance != FIRST) or instance == Instance("other", "-b"):
            one = replace(one, components=(*one.components, "revision"))
        write_overlay(folder, one, **instance.fields(folder, one))
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    together = {**head, "resources": [str(number) for number in range(len(instances))]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(together))
    alone = [one for instance in instances for one in build_instance(GPU_ALL, instance)]
    assert {json.dumps(one, sort_keys=True) for one in build(tmp_path)} == {
        json.dumps(one, sort_keys=True) for one in alone
    }


def _set(*path: str | int) -> Callable[[Manifest, Any], None]:
    """Returns a function that sets the value at this path of a manifest."""

    def change(manifest: Manifest, value: Any) -> None:
        node: Any = manifest
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


_INSTANCE = "app.kubernetes.io/instance"
_POD = ("spec", "template", "spec")
_LEADER = ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec")
_RANK = ("spec", "leaderWorkerTemplate", "workerTemplate", "spec")
_SETTINGS = ("envFrom", 0, "configMapRef", "name")
_THREADS = ("valueFrom", "configMapKeyRef", "name")
_CLAIM = ("persistentVolumeClaim", "claimName")
_SPREAD = ("labelSelector", "matchLabels", _INSTANCE)


@pytest.mark.parametrize(
    ("variant", "kind", "name", "path", "value"),
    [
        (BASE, "Service", "lookonce-encoder", ("spec", "selector", _INSTANCE), "lookonce"),
        (BASE, "Deployment", "lookonce-redis", ("spec", "selector", "matchLabels", _INSTANCE), "lookonce"),
        (BASE, "Deployment", "lookonce-decoder", (*_POD, "volumes", 0, "persistentVolumeClaim", "claimName"), None),
        (BASE, "Deployment", "lookonce-decoder", (*_POD, "containers", 0, "envFrom", 0, "configMapRef", "name"), None),
        (BASE, "ConfigMap", "lookonce-decoder", ("data", "URL"), "redis://lookonce-redis:6379"),
        (BASE, "ConfigMap", "lookonce-decoder", ("data", "URL"), "dns:///lookonce-encoder.lookonce:50051"),
        (BASE, "PodDisruptionBudget", "lookonce-encoder", ("spec", "selector", "matchLabels", _INSTANCE), "lookonce"),
        (HPA, "HorizontalPodAutoscaler", "lookonce-encoder", ("spec", "scaleTargetRef", "name"), None),
        (GPU_ALL, "ScaledObject", "lookonce-encoder", ("spec", "scaleTargetRef", "name"), None),
        (GPU_ALL, "ServiceMonitor", "lookonce", ("spec", "selector", "matchLabels", _INSTANCE), "lookonce"),
        (GPU_ALL, "NetworkPolicy", "lookonce-default-deny", ("spec", "podSelector"), {}),
        (GPU_ALL, "NetworkPolicy", "lookonce-dns", ("spec", "egress", 0, "to", 0), {"podSelector": {}}),
        (GPU_ALL, "NetworkPolicy", "lookonce-dns", ("spec", "egress", 0, "to", 0), {"namespaceSelector": {}}),
        (GRPC_ROUTE, "GRPCRoute", "lookonce", ("spec", "rules", 0, "backendRefs", 0, "name"), "lookonce-decoder"),
        (PROD_ALL, "NetworkPolicy", "lookonce-default-deny", ("spec", "podSelector"), {}),
        (LEADER_WORKER_SET, "LeaderWorkerSet", "lookonce-decoder", (*_LEADER, "containers", 0, *_SETTINGS), None),
        (
            LEADER_WORKER_SET,
            "LeaderWorkerSet",
            "lookonce-decoder",
            (*_RANK, "containers", 0, "env", -1, *_THREADS),
            None,
        ),
        (LEADER_WORKER_SET, "LeaderWorkerSet", "lookonce-decoder", (*_RANK, "volumes", 0, *_CLAIM), None),
        (
            LEADER_WORKER_SET,
            "LeaderWorkerSet",
            "lookonce-decoder",
            (*_RANK, "topologySpreadConstraints", 0, *_SPREAD),
            "lookonce",
        ),
    ],
)
def test_the_walk_finds_every_kind_of_reference(
    variant: Variant, kind: str, name: str, path: tuple[str | int, ...], value: Any
) -> None:
    second = copy.deepcopy(build_instance(variant, Instance(name_suffix="-b")))
    broken = find(second, kind, f"{name}-b")
    # Most references are to an object of the same name as the one that refers.
    wanted = "lookonce-model" if path[-1] == "claimName" else name
    _set(*path)(broken, wanted if value is None else value)
    (found,) = {one.split(" ")[0] for one in references(second, build_instance(variant, FIRST))}
    assert found == f"{kind}/{name}-b"


@pytest.mark.parametrize("instance", [Instance(name_suffix="-b"), Instance(namespace="other")], ids=str)
def test_the_walk_finds_queries_without_the_transformer(instance: Instance, tmp_path: pathlib.Path) -> None:
    fields = instance.fields(tmp_path, GPU_ALL)
    del fields["transformers"]
    write_overlay(tmp_path, GPU_ALL, **fields)
    found = references(build(tmp_path), build_instance(GPU_ALL, FIRST))
    assert {one.split(" ")[0].partition("/")[0] for one in found} == {"ScaledObject"}


def _blocks(language: str) -> list[str]:
    """Returns the code blocks of the page about new models in this language."""
    text = (K8S.parent / "docs/operations/new-model.md").read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_pages_second_instance_refers_to_itself_alone(tmp_path: pathlib.Path) -> None:
    kustomization, _ = _blocks("yaml")
    (tmp_path / "green").mkdir()
    (tmp_path / "green/kustomization.yaml").write_text(
        kustomization.replace("../k8s", relative(tmp_path / "green", ""))
    )
    green, blue = build(tmp_path / "green"), build_instance(BASE, FIRST)
    assert references(green, blue) == references(blue, green) == []
    assert not names(green, "Namespace")


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        ("lookonce", {"lookonce-decoder"}),
        ("lookonce-green", {"lookonce-decoder-green"}),
        (None, {"lookonce-decoder", "lookonce-decoder-green"}),
    ],
)
def test_the_pages_client_address_leads_to_the_decoders_of_one_or_both(
    instance: str | None, expected: set[str]
) -> None:
    _, text = _blocks("yaml")
    service = yaml.safe_load(text)
    assert kubernetes_validate.validate(service, "1.37", strict=True)
    service["spec"]["selector"]["app.kubernetes.io/instance"] = instance
    selector = {key: value for key, value in service["spec"]["selector"].items() if value is not None}
    both = [*build_instance(BASE, FIRST), *build_instance(BASE, Instance(name_suffix="-green"))]
    met = {name for name, labels in pod_labels(both).items() if selector.items() <= labels.items()}
    assert met == expected
