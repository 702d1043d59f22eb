"""Benchmarks as on a processor without AVX-512: what each side is told, and that PyTorch follows."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import report
from benchmarks.forced_level import LEVEL, level_variables, peer_variables
from lookonce.model.kernels.native_level import processor_levels

ROOT = pathlib.Path(__file__).parents[2]


def test_the_peer_is_limited_only_if_a_level_is_forced() -> None:
    assert peer_variables({}) == {}
    assert list(peer_variables({"LOOKONCE_NATIVE_LEVEL": LEVEL})) == ["PYTHONPATH"]


def test_the_peers_interpreter_sees_no_avx512() -> None:
    asked = "import torch; print(torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported())"
    variables = os.environ | peer_variables({"LOOKONCE_NATIVE_LEVEL": LEVEL})
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, env=variables)
    assert said.stdout.split() == ["False", "False"]


CAPABILITIES = {"x86_64": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}


@pytest.mark.parametrize("level", [level.name for level in processor_levels() if level.name in CAPABILITIES])
def test_pytorch_is_limited_to_the_level(level: str) -> None:
    asked = (
        "import torch; from lookonce.model.kernels.native_level import native_level; "
        "print(torch.backends.cpu.get_cpu_capability(), native_level().name)"
    )
    said = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | level_variables(level),
    )  # fmt: skip
    assert said.stdout.split() == [CAPABILITIES[level], level]


def test_a_benchmark_gets_its_arguments_and_the_limits() -> None:
    command = [sys.executable, "-m", "benchmarks.forced_level", "scheduler_cost", "--nonsense"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "benchmarks.scheduler_cost: error: unrecognized arguments: --nonsense" in said.stderr


def test_figures_at_a_forced_level_have_a_section_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report._result_name("speed") == "speed"
    lowest, *higher = processor_levels()
    monkeypatch.setenv("LOOKONCE_NATIVE_LEVEL", lowest.name)
    assert report._result_name("speed") == (f"speed_{lowest.name}" if higher else "speed")
