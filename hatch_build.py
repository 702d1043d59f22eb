"""Build hook: generates the gRPC stubs from protos/ into the `lookonce` package, and compiles kernels for some wheels.

Neither is committed. LOOKONCE_NATIVE_WHEEL names the architecture of a wheel that holds the CPU kernels of all its
levels, `x86_64` or `aarch64`; CXX names the compiler for it. Without the variable a wheel serves every architecture,
and services compile the kernels on first use.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = pathlib.Path(__file__).parent
_KERNELS = "lookonce/model/kernels"
_SOURCES = (f"{_KERNELS}/native", "decoder_svc/runner/cpu/native", "encoder_svc/vision/native")
# The libraries need nothing newer than its glibc and libstdc++ (tests/e2e/test_packages.py).
_PLATFORM = "manylinux_2_28"


def generate_stubs(root: pathlib.Path) -> list[pathlib.Path]:
    """Writes `*_pb2.py`, `*_pb2.pyi`, `*_pb2_grpc.py` and `*_pb2_grpc.pyi`; returns their folders."""
    import grpc_tools
    from grpc_tools import protoc

    protos = root / "protos"
    files = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    bin_dir = pathlib.Path(sys.executable).parent
    plugins = [
        f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy', bin_dir)}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc', bin_dir)}",
    ]
    arguments = [
        "protoc",
        f"-I{protos}",
        f"-I{well_known}",
        *plugins,
        f"--python_out={root}",
        f"--grpc_python_out={root}",
        f"--mypy_out=quiet:{root}",
        f"--mypy_grpc_out=quiet:{root}",
        *files,
    ]
    status = protoc.main(arguments)
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")
    folders = sorted({(root / file).parent for file in files})
    for folder in folders:
        for package in (folder, folder.parent):
            (package / "__init__.py").write_text('"""Generated from protos/; do not edit."""\n')
    return folders


def _plugin(name: str, bin_dir: pathlib.Path) -> str:
    """Returns the path of a protoc plugin. Build isolation puts scripts beside the interpreter or elsewhere on PATH."""
    import shutil

    beside = bin_dir / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed; it comes with mypy-protobuf")
    return found


def compile_kernels(root: pathlib.Path, machine: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Compiles the libraries of all levels of an architecture into a folder; returns their paths."""
    spec = importlib.util.spec_from_file_location("native_compiler", root / _KERNELS / "native_compiler.py")
    assert spec is not None
    assert spec.loader is not None
    compiler = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = compiler
    spec.loader.exec_module(compiler)
    levels = compiler.machine_levels(machine)
    if not any(level.features for level in levels):
        raise RuntimeError(f"there are no kernels for the architecture {machine!r}")
    paths = []
    for level in levels:
        for sources in _SOURCES:
            path = folder / compiler.library_name(root / sources, level)
            compiler.compile_library(compiler.find_compiler(), level, root / sources, path)
            paths.append(path)
    return paths


class BuildHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Hook that hatch runs before it builds a wheel, an sdist or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates the stubs, which hatch then includes through `artifacts`, and compiles kernels if asked to."""
        generate_stubs(ROOT)
        machine = os.environ.get("LOOKONCE_NATIVE_WHEEL")
        if not machine or self.target_name != "wheel" or version == "editable":
            return
        folder = pathlib.Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._compiled = compile_kernels(ROOT, machine, folder)
        for path in self._compiled:
            build_data["force_include"][str(path)] = f"{_KERNELS}/compiled/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_PLATFORM}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the compiled libraries, which are in the wheel now."""
        for path in getattr(self, "_compiled", ()):
            path.unlink()


if __name__ == "__main__":
    generate_stubs(ROOT)
