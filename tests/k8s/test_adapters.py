"""Tests of the component adapters: decoders read LoRA adapters from a claim, which nobody else mounts."""

from __future__ import annotations

import pathlib
import re
import textwrap
from typing import Any

import pytest
import yaml

from lookonce.model.adapter_folder import named_folders
from tests.k8s.manifests import DECODER, ENCODER, RANK, container, names, parsed_settings, pod, pods
from tests.k8s.render import Manifest
from tests.k8s.variants import (
    ADAPTERS,
    K8S,
    LEADER_WORKER_SET_PROD,
    PROD_ALL,
    Variant,
    build,
    rendered,
    skip_without_tool,
    write_overlay,
)

_COMMENT = (K8S / "components/adapters/kustomization.yaml").read_text("utf-8")


def _mount(manifests: list[Manifest]) -> dict[str, Any]:
    (mount,) = (one for one in container(manifests, DECODER.name)["volumeMounts"] if one["name"] == "adapters")
    return dict(mount)


@pytest.mark.parametrize("variant", [ADAPTERS, PROD_ALL], ids=str)
def test_decoders_alone_mount_the_claim_and_cannot_write_to_it(variant: Variant) -> None:
    manifests = rendered(variant)
    (volume,) = (one for one in pod(manifests, DECODER.name)["volumes"] if one["name"] == "adapters")
    claim = volume["persistentVolumeClaim"]
    assert claim["claimName"] in names(manifests, "PersistentVolumeClaim")
    assert claim["readOnly"]
    assert _mount(manifests)["readOnly"]
    assert "adapters" not in {one["name"] for one in pod(manifests, ENCODER.name)["volumes"]}


def test_ranks_mount_no_adapters_because_their_leader_sends_them() -> None:
    manifests = rendered(LEADER_WORKER_SET_PROD)
    volumes = {name: {one["name"] for one in pods(manifests)[name]["volumes"]} for name in (DECODER.name, RANK)}
    assert "adapters" in volumes[DECODER.name]
    assert "adapters" not in volumes[RANK]


def test_the_component_alone_serves_the_base_model() -> None:
    assert not named_folders(parsed_settings(rendered(ADAPTERS), DECODER).adapters)


def test_the_proposed_patch_names_adapters_in_the_volume(tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    shown = re.search(r"^#   patches:\n(?:#    .*\n)+", _COMMENT, re.MULTILINE)
    assert shown is not None
    patches = yaml.safe_load(textwrap.dedent(re.sub(r"^#", "", shown[0], flags=re.MULTILINE)))["patches"]
    write_overlay(tmp_path, ADAPTERS, patches=patches)
    manifests = build(tmp_path)
    folders = named_folders(parsed_settings(manifests, DECODER).adapters)
    assert set(folders) == {"invoices", "forms"}
    assert {str(pathlib.PurePath(folder).parent) for folder in folders.values()} == {_mount(manifests)["mountPath"]}


def test_a_second_instance_has_a_claim_of_its_own(tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    write_overlay(tmp_path, ADAPTERS, nameSuffix="-b")
    manifests = build(tmp_path)
    (volume,) = (one for one in pod(manifests, "lookonce-decoder-b")["volumes"] if one["name"] == "adapters")
    assert volume["persistentVolumeClaim"]["claimName"] == "lookonce-adapters-b"
    assert "lookonce-adapters-b" in names(manifests, "PersistentVolumeClaim")
