"""Build hook that generates the gRPC stubs from protos/ into the `lookonce` package. The stubs are not committed."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = pathlib.Path(__file__).parent


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


class StubsBuildHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Hook that hatch runs before it builds a wheel, an sdist or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates the stubs; hatch then includes them through `artifacts`."""
        generate_stubs(ROOT)


if __name__ == "__main__":
    generate_stubs(ROOT)
