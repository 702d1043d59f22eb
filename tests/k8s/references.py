"""Finds references from the objects of one instance to those of another, by walking through whole manifests.

It knows nothing of the files below k8s. A reference is a name or host name in any string, a label matcher in a query, a
mounted claim, or a label selector that meets a pod or Service of the other instance.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from tests.k8s.manifests import expanded, group_variables, variables
from tests.k8s.render import Manifest, containers_of, identity, pod_templates

Path: TypeAlias = tuple[str, ...]

# Names of images, of kinds and of the object itself are no references, and selectors are judged by what they meet.
_NO_REFERENCES = frozenset({"image", "apiVersion", "kind", "labels"})
_SELECTORS = frozenset({"selector", "podSelector", "namespaceSelector", "labelSelector"})
_MATCHER = re.compile(r'\b(namespace|service)=~?"([^"]*)"')


def references(of: list[Manifest], to: list[Manifest]) -> list[str]:
    """Returns a description of each reference from the first instance's objects to the second's."""
    found = []
    for manifest in of:
        kind, own_namespace, name = identity(manifest)
        hits = [*_named(manifest, own_namespace, of, to), *_selected(manifest, own_namespace, to)]
        found += [f"{kind}/{name} {hit}" for hit in hits]
    return found


def _named(manifest: Manifest, own_namespace: str, of: list[Manifest], to: list[Manifest]) -> Iterator[str]:
    targets = {identity(one)[1:] for one in to if identity(one)[1]}
    own = {identity(one)[1:] for one in of}
    for path, text in _strings(_with_variables(manifest, own_namespace), ()):
        if path[:2] in {("metadata", "name"), ("metadata", "namespace")}:
            continue
        for label, value in _MATCHER.findall(text):
            known = {namespace if label == "namespace" else name for namespace, name in own}
            if value not in known:
                yield f"asks for {label} {value} at {'.'.join(path)}"
        rest = _MATCHER.sub("", text)
        for namespace, name in targets - own:
            # A name after a single slash is part of a file path.
            for match in re.finditer(rf"(?<![\w.-])(?<!(?<!/)/){re.escape(name)}(?:\.([\w-]+))?(?![\w-])", rest):
                if (match[1] or own_namespace) == namespace:
                    yield f"names {name}.{namespace} at {'.'.join(path)}"


def _with_variables(manifest: Manifest, namespace: str) -> Manifest:
    """Returns an object with variables and arguments as the containers in its pods get them."""
    if not pod_templates(manifest):
        return manifest
    changed = copy.deepcopy(manifest)
    for one in containers_of(changed):
        known = variables(one, namespace, given=group_variables(manifest))
        one["args"] = [expanded(text, known) for text in one.get("args", [])]
        one["env"] = [
            known[variable["name"]] if "value" in variable else variable["valueFrom"] for variable in one.get("env", [])
        ]
    return changed


def _strings(node: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in _NO_REFERENCES | _SELECTORS:
                yield from _strings(value, (*path, key))
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value, path)
    elif isinstance(node, str):
        yield path, node


def _selected(manifest: Manifest, own_namespace: str, to: list[Manifest]) -> Iterator[str]:
    """Yields the objects of the other instance that a label selector anywhere in the manifest meets."""
    is_monitor = manifest["kind"] == "ServiceMonitor"
    for path, rule in _rules(manifest.get("spec", {}), ()):
        for name, namespace, labels in _selectable(to, is_monitor):
            if "namespaceSelector" in rule and not is_monitor:
                reaches = _meets(rule["namespaceSelector"], _namespace_labels(namespace, to))
            else:
                reaches = namespace == own_namespace
            selector: dict[str, Any] = next(
                (rule[key] for key in ("selector", "podSelector", "labelSelector") if key in rule), {}
            )
            if reaches and _meets(selector, labels):
                yield f"selects {name}.{namespace} at {'.'.join(path)}"


def _selectable(manifests: list[Manifest], is_monitor: bool) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yields name, namespace and labels of all pods, or of all Services for a ServiceMonitor."""
    for one in manifests:
        metadata = one["metadata"]
        if is_monitor and one["kind"] == "Service":
            yield metadata["name"], metadata["namespace"], metadata["labels"]
        elif not is_monitor:
            for name, template in pod_templates(one).items():
                yield name, metadata["namespace"], template["metadata"]["labels"]


def _rules(node: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields every mapping that contains selectors."""
    if isinstance(node, dict):
        if _SELECTORS & node.keys():
            yield path, node
        for key, value in node.items():
            if key not in _SELECTORS:
                yield from _rules(value, (*path, key))
    elif isinstance(node, list):
        for value in node:
            yield from _rules(value, path)


def _namespace_labels(name: str, manifests: list[Manifest]) -> dict[str, str]:
    labels = {"kubernetes.io/metadata.name": name}
    for one in manifests:
        if identity(one)[0::2] == ("Namespace", name):
            labels |= one["metadata"].get("labels", {})
    return labels


def _meets(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Returns whether a selector meets these labels. The selector of a Service has no `matchLabels`."""
    if not selector.keys() & {"matchLabels", "matchExpressions"}:
        return selector.items() <= labels.items()
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
