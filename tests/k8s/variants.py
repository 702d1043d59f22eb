"""Renders all that can be deployed: the base, each overlay, each component on the base, and sensible combinations.

The base is rendered by tests/k8s/render.py, everywhere. Overlays and components use more of Kustomize than that knows:
they are rendered by the real tool, and tests of them are skipped where nobody installed it.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

import pytest
import yaml

from tests.k8s.render import Manifest, load_documents, render

K8S = pathlib.Path(__file__).parents[2] / "k8s"
_COMMANDS = (("kustomize", "build"), ("kubectl", "kustomize"))
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Variant:
    """A folder with the components that are added to it."""

    # Folder below k8s that it starts from.
    start: str
    # Folders below k8s/components that are added, in this order.
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join([self.start.removeprefix("overlays/"), *self.components])


BASE = Variant("base")
DEV_CPU = Variant("overlays/dev-cpu")
GPU = Variant("overlays/gpu")
PROD = Variant("overlays/prod-external-redis")
HPA = Variant("base", ("hpa",))
KEDA = Variant("base", ("keda",))
SERVICE_MONITOR = Variant("base", ("servicemonitor",))
NETWORK_POLICY = Variant("base", ("networkpolicy",))
MTLS = Variant("base", ("mtls",))
AFFINITY = Variant("base", ("affinity",))
TOKENS = Variant("base", ("tokens",))
TRACING = Variant("base", ("tracing",))
PROD_ALL = Variant(
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
    ),
)
GPU_ALL = Variant(GPU.start, ("keda", "servicemonitor", "networkpolicy", "affinity"))
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
    PROD_ALL,
    GPU_ALL,
)


def kustomize() -> list[str] | None:
    """Command line of the real tool, without the folder; None where there is none."""
    return next((list(command) for command in _COMMANDS if shutil.which(command[0])), None)


def rendered(variant: Variant) -> list[Manifest]:
    """Its manifests; not to be changed. Skips the test where they need the real tool and there is none."""
    if variant != BASE and kustomize() is None:
        pytest.skip("neither kustomize nor kubectl is installed, and overlays and components want the real tool")
    return _rendered(variant)


@functools.cache
def _rendered(variant: Variant) -> list[Manifest]:
    if variant == BASE:
        return render(K8S / "base")
    if not variant.components:
        return build(K8S / variant.start)
    with tempfile.TemporaryDirectory() as folder:
        # Kustomize takes relative paths only.
        start, *components = (
            os.path.relpath(K8S / path, os.path.realpath(folder))
            for path in (variant.start, *(f"components/{name}" for name in variant.components))
        )
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [start],
            "components": components,
        }
        (pathlib.Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return build(pathlib.Path(folder))


def build(folder: pathlib.Path) -> list[Manifest]:
    """Renders a folder with the real tool. Raises AssertionError with its output when it fails or warns."""
    command = kustomize()
    assert command is not None
    with tempfile.TemporaryDirectory() as target:
        path = pathlib.Path(target) / "manifests.yaml"
        finished = subprocess.run(
            [*command, os.path.realpath(folder), "--output", str(path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        assert (finished.returncode, finished.stderr) == (0, "")
        return load_documents(path)
