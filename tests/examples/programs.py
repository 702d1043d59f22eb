"""The programs in `examples/`, set up in a temporary folder as their pages say and with nothing of this repository."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from tests.conftest import REPOSITORY

BUF = pathlib.Path(sys.executable).parent / "buf"
# All that the Python example may import: its requirements, and what they bring along.
_PYTHON_PACKAGES = ("google", "grpc", "grpc_status", "typing_extensions.py")
_MIN_NODE_VERSION = 20
_NO_REGISTRY = "the npm registry does not answer"
# Without a network, npm would try for minutes. With one, all takes ten seconds.
_INSTALL_TIMEOUT_S = 90.0
_QUESTION_TIMEOUT_S = 20.0
_ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Program:
    """One example, ready to run."""

    command: Sequence[str]
    environment: Mapping[str, str]

    def ask(self, target: str, picture: pathlib.Path, question: str) -> subprocess.CompletedProcess[str]:
        """Runs the program; its answer is on the standard output, all else on the standard error."""
        return subprocess.run(
            [*self.command, target, str(picture), question],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )


def python_program(folder: pathlib.Path) -> Program:
    """Generates the stubs with protoc. The program can import them and the packages that it needs, and nothing else."""
    example = _copied("python", folder)
    stubs, packages = example / "gen", folder / "packages"
    stubs.mkdir()
    (protoc,) = _commands(example, "python -m grpc_tools.protoc ")
    _run([sys.executable, *protoc[1:]], example)
    packages.mkdir()
    installed = pathlib.Path(sysconfig.get_path("platlib"))
    for name in _PYTHON_PACKAGES:
        (packages / name).symlink_to(installed / name)
    # With -S, Python finds no installed packages by itself, nor this repository through one of them.
    environment = {**os.environ, "PYTHONPATH": f"{stubs}{os.pathsep}{packages}"}
    return Program((sys.executable, "-S", str(example / "ask.py")), environment)


def typescript_program(folder: pathlib.Path) -> Program:
    """Installs the npm packages of the lock file, generates the stubs with buf, and compiles the program.

    Skips the test without Node.js, and where the packages cannot be had.
    """
    if not _has_node():
        pytest.skip("Node.js 20 or newer and npm are not installed")
    example = _copied("typescript", folder)
    _install_packages(example)
    for name in ("generate", "build"):
        (command,) = _commands(example, f"npm run {name}")
        _run(command, example)
    return Program(("node", str(example / "dist/ask.js")), os.environ)


def _copied(language: str, folder: pathlib.Path) -> pathlib.Path:
    """Copies one example and the contract, as they lie in the repository, without what was generated there."""
    ignored = shutil.ignore_patterns("node_modules", "gen", "dist", "__pycache__")
    example = folder / "examples" / language
    shutil.copytree(REPOSITORY / "examples" / language, example, ignore=ignored)
    shutil.copytree(REPOSITORY / "protos", folder / "protos")
    shutil.copy(REPOSITORY / "buf.yaml", folder)
    return example


def _commands(example: pathlib.Path, beginning: str) -> list[list[str]]:
    """Returns the commands on an example's page that begin so."""
    lines = (example / "README.md").read_text().splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith(f"$ {beginning}")]


def _has_node() -> bool:
    if shutil.which("node") is None or shutil.which("npm") is None:
        return False
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return int(version.removeprefix("v").partition(".")[0]) >= _MIN_NODE_VERSION


def _install_packages(example: pathlib.Path) -> None:
    """Skips the test if the registry does not answer in time; any other failure is the example's own."""
    try:
        _run(["npm", "ci", "--prefer-offline", "--ignore-scripts", "--fetch-retries=1"], example, _INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(_NO_REGISTRY)
    except AssertionError:
        if not _registry_answers(example):
            pytest.skip(_NO_REGISTRY)
        raise


def _registry_answers(example: pathlib.Path) -> bool:
    """Asks for one package, past the cache."""
    try:
        _run(["npm", "view", "@grpc/grpc-js", "version", "--fetch-retries=0"], example, _QUESTION_TIMEOUT_S)
    except (AssertionError, subprocess.TimeoutExpired):
        return False
    return True


def _run(command: Sequence[str], folder: pathlib.Path, timeout_s: float = 60.0) -> None:
    path = f"{BUF.parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
