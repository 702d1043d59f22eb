"""Renders a Kustomize base without kustomize. It supports only the features that k8s/base uses and refuses others.

Supported: `resources` (files and folders), `namespace`, `labels` with `pairs` and `includeTemplates`, `images` with
`name`, `newName` and `newTag`. `configurations` are ignored: they matter only for names with a suffix or prefix. If the
real tool is installed, a test compares the two.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]

_API_VERSION = "kustomize.config.k8s.io/v1beta1"
_CLUSTER_KINDS = frozenset({"Namespace"})
# Kinds that the transformers below support. In other kinds they might miss a pod template or a reference.
_NAMESPACED_KINDS = frozenset(
    {"ConfigMap", "Deployment", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "Service"}
)


class UnsupportedKustomizationError(Exception):
    """The base uses a feature that this renderer does not support. Use the real tool, or extend the renderer."""


class DuplicateKeyError(Exception):
    """A YAML mapping contains a key twice, which a plain loader would accept without notice."""


def render(folder: pathlib.Path) -> list[Manifest]:
    """Returns the manifests of a kustomization folder, in the order of its resources.

    Raises UnsupportedKustomizationError, and DuplicateKeyError for a key that appears twice.
    """
    documents = load_documents(folder / "kustomization.yaml")
    if len(documents) != 1:
        raise UnsupportedKustomizationError(f"{folder}/kustomization.yaml has {len(documents)} documents, not 1")
    kustomization = documents[0]
    known = {"apiVersion", "kind", "namespace", "labels", "configurations", "resources", "images"}
    _check_keys(kustomization, "kustomization", known)
    if (kustomization["apiVersion"], kustomization["kind"]) != (_API_VERSION, "Kustomization"):
        raise UnsupportedKustomizationError(f"{folder}/kustomization.yaml is no {_API_VERSION} Kustomization")
    manifests = [
        manifest for name in kustomization.get("resources", []) for manifest in _load_resource(folder / str(name))
    ]
    for transform in _transforms(kustomization):
        for manifest in manifests:
            transform(manifest)
    _check_unique(manifests)
    return manifests


def load_documents(path: pathlib.Path) -> list[Manifest]:
    """Returns the non-empty YAML documents of a file. Raises DuplicateKeyError."""
    return [document for document in yaml.load_all(path.read_text("utf-8"), _StrictLoader) if document]


def identity(manifest: Manifest) -> tuple[str, str, str]:
    """Returns (kind, namespace, name); the namespace is empty for a manifest without one."""
    metadata = manifest["metadata"]
    return (manifest["kind"], metadata.get("namespace", ""), metadata["name"])


class _StrictLoader(yaml.CSafeLoader):
    """YAML loader for plain types only, which refuses a key that appears twice. PyYAML's wheels contain its C part."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            raise DuplicateKeyError(f"{', '.join(sorted(repeated))} stands twice{node.start_mark}")
        return super().construct_mapping(node, deep=deep)


def _load_resource(path: pathlib.Path) -> list[Manifest]:
    if path.is_dir():
        return render(path)
    if path.is_file():
        return load_documents(path)
    raise UnsupportedKustomizationError(f"resource {path} is neither a file nor a folder here")


def _transforms(kustomization: Manifest) -> Iterator[Callable[[Manifest], None]]:
    namespace = kustomization.get("namespace")
    if namespace is not None:
        yield lambda manifest: _set_namespace(manifest, namespace)
    for rule in kustomization.get("labels", []):
        yield _label_transform(rule)
    for rule in kustomization.get("images", []):
        yield _image_transform(rule)


def _set_namespace(manifest: Manifest, namespace: str) -> None:
    kind = manifest["kind"]
    if kind in _CLUSTER_KINDS:
        manifest["metadata"]["name"] = namespace
    elif kind in _NAMESPACED_KINDS:
        manifest["metadata"]["namespace"] = namespace
    else:
        raise UnsupportedKustomizationError(f"kind {kind} is not known to this renderer")


def _label_transform(rule: Manifest) -> Callable[[Manifest], None]:
    _check_keys(rule, "labels", {"pairs", "includeTemplates"})

    def add_labels(manifest: Manifest) -> None:
        owners = [manifest]
        if rule.get("includeTemplates", False) and manifest["kind"] == "Deployment":
            owners.append(manifest["spec"]["template"])
        for owner in owners:
            owner["metadata"].setdefault("labels", {}).update(rule["pairs"])

    return add_labels


def _image_transform(rule: Manifest) -> Callable[[Manifest], None]:
    _check_keys(rule, "images", {"name", "newName", "newTag"})

    def set_image(manifest: Manifest) -> None:
        for container in containers_of(manifest):
            name, _, tag = container["image"].partition(":")
            if name == rule["name"]:
                tag = rule.get("newTag", tag)
                container["image"] = rule.get("newName", name) + (f":{tag}" if tag else "")

    return set_image


def pod_templates(manifest: Manifest) -> dict[str, Manifest]:
    """Returns the templates of a manifest's pods by the name of these pods; none for a kind without pods.

    Pods of a Deployment have its name. Those of a LeaderWorkerSet are decoders, which have its name, and their ranks.
    """
    name = manifest["metadata"]["name"]
    if manifest["kind"] == "Deployment":
        return {name: manifest["spec"]["template"]}
    if manifest["kind"] == "LeaderWorkerSet":
        group = manifest["spec"]["leaderWorkerTemplate"]
        return {name: group["leaderTemplate"], name.replace("decoder", "rank"): group["workerTemplate"]}
    return {}


def containers_of(manifest: Manifest) -> list[Manifest]:
    """Returns all containers in the pods of a manifest, including init containers; none for a kind without pods."""
    return [one for template in pod_templates(manifest).values() for one in containers_in(template["spec"])]


def containers_in(pod: Manifest) -> list[Manifest]:
    """Returns all containers in the specification of a pod, including init containers."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def _check_keys(found: Mapping[str, Any], place: str, known: set[str]) -> None:
    if unknown := set(found) - known:
        raise UnsupportedKustomizationError(f"{place}: {', '.join(sorted(unknown))} is not known to this renderer")


def _check_unique(manifests: list[Manifest]) -> None:
    identities = [identity(manifest) for manifest in manifests]
    if len(set(identities)) != len(identities):
        raise UnsupportedKustomizationError("two manifests have the same kind, namespace and name")
