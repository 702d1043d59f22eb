"""Device plug-ins for tests: the example, built and installed by pip, and distributions written by hand."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Mapping

from lookonce.devices.registry import GROUP

EXAMPLE = pathlib.Path(__file__).with_name("example_device")


def install_example(folder: pathlib.Path) -> pathlib.Path:
    """Builds and installs the example into a folder for the module path; returns the folder. Needs no network."""
    # pip's build writes beside the sources.
    sources = folder / "sources"
    for path in (*EXAMPLE.glob("pyproject.toml"), *EXAMPLE.glob("fixed_steps/*.py")):
        copy = sources / path.relative_to(EXAMPLE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text("utf-8"), "utf-8")
    target = folder / "installed"
    # PyTorch depends on setuptools, so the build backend is installed wherever these tests run.
    flags = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(sources)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    return target


def plant_plugin(folder: pathlib.Path, distribution: str, devices: Mapping[str, str], **modules: str) -> None:
    """Writes an installed distribution with these entry points, name to "module:object", and these modules."""
    metadata = folder / f"{distribution}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in devices.items())
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
