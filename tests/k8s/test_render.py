"""Tests that the renderer agrees with the real tool and refuses unknown features."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest
import yaml

from tests.k8s.render import DuplicateKeyError, Manifest, UnsupportedKustomizationError, identity, render

BASE = pathlib.Path(__file__).parents[2] / "k8s/base"
_HEAD = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"


def _real_tools() -> list[list[str]]:
    """Returns the command lines of the real renderers that are installed on this machine."""
    commands = (["kustomize", "build"], ["kubectl", "kustomize"])
    return [command for command in commands if shutil.which(command[0]) is not None]


def _by_identity(manifests: list[Manifest]) -> dict[tuple[str, str, str], Manifest]:
    return {identity(manifest): manifest for manifest in manifests}


def _folder(path: pathlib.Path, kustomization: str, **files: str) -> pathlib.Path:
    (path / "kustomization.yaml").write_text(_HEAD + kustomization)
    for name, text in files.items():
        (path / f"{name}.yaml").write_text(text)
    return path


def test_rendering_equals_that_of_the_real_tools_where_there_are_any() -> None:
    ours = _by_identity(render(BASE))
    for command in _real_tools():
        finished = subprocess.run([*command, str(BASE)], capture_output=True, text=True, check=True)
        assert _by_identity(list(yaml.safe_load_all(finished.stdout))) == ours


def test_images_labels_and_namespace_are_set(tmp_path: pathlib.Path) -> None:
    kustomization = (
        "namespace: here\nresources: [app.yaml]\nlabels: [{pairs: {a: b}, includeTemplates: true}]\n"
        "images: [{name: app, newName: registry.example:5000/app, newTag: 1.2.3}]\n"
    )
    app = (
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: app}\n"
        "spec: {template: {metadata: {}, spec: {containers: [{name: app, image: app}]}}}\n"
    )
    (manifest,) = render(_folder(tmp_path, kustomization, app=app))
    template = manifest["spec"]["template"]
    assert manifest["metadata"] == {"name": "app", "namespace": "here", "labels": {"a": "b"}}
    assert template["metadata"]["labels"] == {"a": "b"}
    assert template["spec"]["containers"][0]["image"] == "registry.example:5000/app:1.2.3"


@pytest.mark.parametrize(
    "kustomization",
    [
        "patches: []\n",
        "commonLabels: {a: b}\n",
        "labels: [{pairs: {a: b}, includeSelectors: true}]\n",
        "images: [{name: app, digest: sha256:00}]\n",
        "resources: [absent.yaml]\n",
        "resources: [https://example.com/base]\n",
    ],
)
def test_unknown_options_are_refused(tmp_path: pathlib.Path, kustomization: str) -> None:
    with pytest.raises(UnsupportedKustomizationError):
        render(_folder(tmp_path, kustomization))


def test_an_unknown_kind_is_refused(tmp_path: pathlib.Path) -> None:
    job = "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: job}\n"
    with pytest.raises(UnsupportedKustomizationError, match="CronJob"):
        render(_folder(tmp_path, "namespace: here\nresources: [job.yaml]\n", job=job))


def test_two_manifests_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    settings = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: same}\n"
    folder = _folder(tmp_path, "resources: [one.yaml, two.yaml]\n", one=settings, two=settings)
    with pytest.raises(UnsupportedKustomizationError, match="same kind"):
        render(folder)


def test_a_key_that_stands_twice_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DuplicateKeyError, match="namespace"):
        render(_folder(tmp_path, "namespace: one\nnamespace: two\n"))
