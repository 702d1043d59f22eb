"""Stubs for other languages can be generated with the templates in `protos/`. TypeScript's are in tests/examples."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

BUF = pathlib.Path(sys.executable).parent / "buf"
# The programs that must be on PATH beside buf, and some of the files that they write.
LANGUAGES = {
    "python": (
        ["grpc_python_plugin"],
        ["decoder_service_pb2.py", "decoder_service_pb2.pyi", "decoder_service_pb2_grpc.py"],
    ),
    "go": (["protoc-gen-go", "protoc-gen-go-grpc"], ["decoder_service.pb.go", "decoder_service_grpc.pb.go"]),
    "java": (["protoc", "protoc-gen-grpc-java"], ["DecoderServiceGrpc.java", "GenerateParams.java"]),
}


def generate(language: str, folder: pathlib.Path, path: str) -> subprocess.CompletedProcess[str]:
    template = f"protos/buf.gen.{language}.yaml"
    return subprocess.run(
        [BUF, "generate", "--template", template, "--output", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("language", LANGUAGES)
def test_stubs_are_generated(language: str, tmp_path: pathlib.Path) -> None:
    programs, files = LANGUAGES[language]
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"programs that generate stubs are not installed: {', '.join(missing)}")
    # Python's protoc runs in this environment.
    finished = generate(language, tmp_path, f"{BUF.parent}{os.pathsep}{os.environ['PATH']}")
    assert finished.returncode == 0, finished.stderr
    folder = tmp_path / "gen" / language / "lookonce/decoder/v1"
    assert {*files} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("language", "plugins"),
    [
        ("go", ["protoc-gen-go", "protoc-gen-go-grpc"]),
        ("java", ["protoc", "protoc-gen-grpc-java"]),
        ("rust", ["protoc-gen-prost", "protoc-gen-tonic"]),
        ("typescript", ["protoc-gen-ts_proto"]),
    ],
)
def test_buf_names_the_plugins_that_are_not_installed(
    language: str, plugins: list[str], tmp_path: pathlib.Path
) -> None:
    finished = generate(language, tmp_path, str(tmp_path))
    assert finished.returncode != 0
    # With the first plugin that is missing, buf may leave out the others.
    assert any(f'exec: "{plugin}": executable file not found' in finished.stderr for plugin in plugins)
