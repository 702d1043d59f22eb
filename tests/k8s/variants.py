"""All variants that can be deployed, rendered: the base, each overlay, each component, and sensible combinations.

tests/k8s/render.py renders the base on every machine. Overlays and components use more features of Kustomize: the real
tool renders them, and their tests are skipped if it is not installed.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.k8s.render import Manifest, load_documents, render

K8S = pathlib.Path(__file__).parents[2] / "k8s"
_COMMANDS = (("kustomize", "build"), ("kubectl", "kustomize"))
_TIMEOUT_S = 60
# The tool is a Go program that takes 110 MB even if it never collects garbage, and a quarter less CPU.
_VARIABLES = {"GOGC": "off"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of an overlay or the base with components."""

    # Folder of the base or overlay, below k8s.
    start: str
    # Folders of the added components below k8s/components, in this order.
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join([self.start.removeprefix("overlays/"), *self.components])


BASE = Variant("base")
DEV_CPU = Variant("overlays/dev-cpu")
GPU = Variant("overlays/gpu")
PROD = Variant("overlays/prod-external-redis")
HPA = Variant("base", ("hpa",))
KEDA = Variant("base", ("keda",))
IMAGE_VOLUME = Variant("base", ("model-image-volume",))
INIT_CONTAINER = Variant("base", ("model-init-container",))
GRPC_ROUTE = Variant("base", ("grpc-route",))
REVISION = Variant("base", ("revision",))
SERVICE_MONITOR = Variant("base", ("servicemonitor",))
NETWORK_POLICY = Variant("base", ("networkpolicy",))
MTLS = Variant("base", ("mtls",))
AFFINITY = Variant("base", ("affinity",))
TOKENS = Variant("base", ("tokens",))
TRACING = Variant("base", ("tracing",))
ADAPTERS = Variant("base", ("adapters",))
ADMIN = Variant("base", ("tokens", "admin"))
GATEWAY = Variant("base", ("tokens", "gateway", "networkpolicy", "networkpolicy/gateway", "servicemonitor"))
PROD_ALL = Variant(
    PROD.start,
    (
        "hpa",
        "servicemonitor",
        "networkpolicy",
        "networkpolicy/external-redis",
        "networkpolicy/tracing",
        "networkpolicy/admin",
        "mtls",
        "tokens",
        "tracing",
        "admin",
        "admin/mtls",
        "gateway",
        "gateway/mtls",
        "networkpolicy/gateway",
        "adapters",
    ),
)
GPU_ALL = Variant(
    GPU.start,
    ("keda", "servicemonitor", "networkpolicy", "affinity", "decoder-affinity", "networkpolicy/decoder-affinity"),
)
LEADER_WORKER_SET = Variant("overlays/leaderworkerset")
LEADER_WORKER_SET_PROD = Variant(
    PROD.start,
    (
        "hpa",
        "servicemonitor",
        "networkpolicy",
        "networkpolicy/external-redis",
        "networkpolicy/tracing",
        "mtls",
        "tokens",
        "tracing",
        "gateway",
        "gateway/mtls",
        "networkpolicy/gateway",
        "adapters",
        "leaderworkerset",
        "networkpolicy/ranks",
    ),
)
LEADER_WORKER_SET_AFFINITY = Variant(
    "base",
    (
        "keda",
        "servicemonitor",
        "networkpolicy",
        "affinity",
        "decoder-affinity",
        "networkpolicy/decoder-affinity",
        "model-init-container",
        "leaderworkerset",
        "networkpolicy/ranks",
    ),
)
VARIANTS = (
    BASE,
    DEV_CPU,
    GPU,
    PROD,
    HPA,
    KEDA,
    SERVICE_MONITOR,
    NETWORK_POLICY,
    MTLS,
    AFFINITY,
    TOKENS,
    TRACING,
    ADAPTERS,
    ADMIN,
    GATEWAY,
    GRPC_ROUTE,
    REVISION,
    IMAGE_VOLUME,
    INIT_CONTAINER,
    PROD_ALL,
    GPU_ALL,
    LEADER_WORKER_SET,
    LEADER_WORKER_SET_PROD,
    LEADER_WORKER_SET_AFFINITY,
)


def kustomize() -> list[str] | None:
    """Returns the command line of the real tool without the folder, or None if it is not installed."""
    return next((list(command) for command in _COMMANDS if shutil.which(command[0])), None)


def rendered(variant: Variant) -> list[Manifest]:
    """Returns the manifests, which must not be changed. Skips the test if they need the real tool and it is missing."""
    if variant != BASE:
        skip_without_tool()
    return _rendered(variant)


def run_tool(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the real tool on a folder. It must be installed."""
    command = kustomize()
    assert command is not None
    return subprocess.run(
        [*command, os.path.realpath(folder), *arguments],
        env=os.environ | _VARIABLES,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )


def skip_without_tool() -> None:
    """Skips the test if the real tool is missing."""
    if kustomize() is None:
        pytest.skip("neither kustomize nor kubectl is installed, and overlays and components want the real tool")


@functools.cache
def _rendered(variant: Variant) -> list[Manifest]:
    if variant == BASE:
        return render(K8S / "base")
    if not variant.components:
        return build(K8S / variant.start)
    with tempfile.TemporaryDirectory() as folder:
        write_overlay(pathlib.Path(folder), variant)
        return build(pathlib.Path(folder))


def write_overlay(folder: pathlib.Path, variant: Variant, **fields: object) -> None:
    """Writes the kustomization of a variant to an existing folder, with further fields."""
    start, *components = (
        relative(folder, path) for path in (variant.start, *(f"components/{name}" for name in variant.components))
    )
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [start],
        "components": components,
        **fields,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))


def relative(folder: pathlib.Path, path: str) -> str:
    """Returns a path below k8s as seen from this folder. Kustomize accepts only relative paths."""
    return os.path.relpath(K8S / path, os.path.realpath(folder))


def build(folder: pathlib.Path) -> list[Manifest]:
    """Renders a folder with the real tool. Raises AssertionError with its output if it fails or warns."""
    with tempfile.TemporaryDirectory() as target:
        path = pathlib.Path(target) / "manifests.yaml"
        finished = run_tool(folder, "--output", str(path))
        assert (finished.returncode, finished.stderr) == (0, "")
        return load_documents(path)


def proposed_patches(file: pathlib.Path, indent: int) -> list[dict[str, Any]]:
    """Returns the patches that the comment of a kustomization shows, which begin behind so many spaces."""
    prefix = rf"^# {{{indent}}}"
    shown = re.search(rf"{prefix}patches:\n(?:{prefix} .*\n)+", file.read_text("utf-8"), re.MULTILINE)
    assert shown is not None
    patches: list[dict[str, Any]] = yaml.safe_load(re.sub(prefix, "", shown[0], flags=re.MULTILINE))["patches"]
    return patches
