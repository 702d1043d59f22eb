"""The kernels of each level compute the right numbers, and a process uses the best level that its processor has."""

from __future__ import annotations

import pathlib
import platform
import shutil
import subprocess
from collections.abc import Sequence

import pytest
import torch

from decoder_svc.runner.cpu import attention
from encoder_svc.vision import dense_attention
from lookonce.errors import ConfigurationError
from lookonce.model.kernels import native_library
from lookonce.model.kernels.native_compiler import LEVELS, NativeLevel
from lookonce.model.kernels.native_level import native_level, processor_levels

NATIVE = pathlib.Path(__file__).with_name("native")
INCLUDED = (pathlib.Path(native_library.__file__).with_name("native"), attention.SOURCES, dense_attention.SOURCES)
BY_NAME = {level.name: level for level in LEVELS}
ARM_LEVELS = [level for level in LEVELS if level.machine == "aarch64"]
ARM_COMPILER = "aarch64-linux-gnu-g++"
# SVE's vectors have the size that the level is for.
EMULATOR = ("qemu-aarch64", "-cpu", "max,sve256=on,sve-default-vector-length=32")
_TIMEOUT_S = 600


def checked(compiler: str, flags: Sequence[str], program: pathlib.Path, emulator: Sequence[str] = ()) -> str:
    """Compiles and runs kernel_checks.cpp; returns its output.

    The flags name the optimisation. Most of the time goes to the compiler, and `-Og` halves it. The libraries that
    services load have `-O3`; test_native_stack.py and test_dense_attention.py check those of every level.
    """
    folders = [f"-I{folder}" for folder in INCLUDED]
    source = str(NATIVE / "kernel_checks.cpp")
    command = [compiler, "-std=c++17", "-fopenmp", *flags, *folders, "-o", str(program), source]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    assert compiled.returncode == 0, compiled.stderr
    command = [*emulator, str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S).stdout


def compiler() -> str:
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("there is no C++ compiler here")
    return found


@pytest.mark.parametrize("level", processor_levels(), ids=lambda level: level.name)
def test_kernels_of_this_processors_levels_are_right(level: NativeLevel, tmp_path: pathlib.Path) -> None:
    assert checked(compiler(), ("-Og", *level.flags), tmp_path / "checks").startswith("0 checks failed")


# Emulating all kernels takes a minute on an idle machine.
@pytest.mark.timeout(2 * _TIMEOUT_S)
@pytest.mark.parametrize("level", ARM_LEVELS, ids=lambda level: level.name)
def test_kernels_of_arm_processors_are_right_in_an_emulator(level: NativeLevel, tmp_path: pathlib.Path) -> None:
    if shutil.which(ARM_COMPILER) is None or shutil.which(EMULATOR[0]) is None:
        pytest.skip("the Debian packages g++-aarch64-linux-gnu and qemu-user are not installed")
    found = checked(ARM_COMPILER, ("-O2", "-static", *level.flags), tmp_path / "checks", EMULATOR)
    num_bytes = 32 if level.name == "sve256_bf16" else 16
    assert found == f"0 checks failed, registers of {num_bytes} bytes\n"


@pytest.mark.skipif(
    BY_NAME["avx512_bf16"] not in processor_levels(), reason="AMX is emulated on processors with AVX512-BF16"
)
def test_products_by_amx_are_right_with_its_instructions_in_plain_loops(tmp_path: pathlib.Path) -> None:
    emulation = ("-D__AMX_BF16__", "-include", str(NATIVE / "emulated_amx.h"))
    flags = ("-Og", *BY_NAME["avx512_bf16"].flags, *emulation)
    assert checked(compiler(), flags, tmp_path / "checks").startswith("0 checks failed")


def use_processor(monkeypatch: pytest.MonkeyPatch, machine: str, **features: bool | int) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"l2_cache_size": 1048576, **features})


def names(levels: Sequence[NativeLevel]) -> list[str]:
    return [level.name for level in levels]


AVX2 = dict.fromkeys(BY_NAME["avx2"].features, True)
AVX512 = dict.fromkeys(BY_NAME["avx512"].features, True)
AVX512_BF16 = dict.fromkeys(BY_NAME["avx512_bf16"].features, True)
AMX = dict.fromkeys(BY_NAME["amx_bf16"].features, True)
SVE = {"neon": True, "bf16": True, "sve_bf16": True}


@pytest.mark.parametrize(
    ("machine", "features", "best"),
    [
        ("x86_64", {}, "x86_64"),
        ("AMD64", AVX2, "avx2"),
        ("x86_64", {**AVX2, "fma3": False}, "x86_64"),
        ("x86_64", AVX512, "avx512"),
        ("x86_64", {**AVX512, "avx512_dq": False}, "avx2"),
        ("x86_64", AVX512_BF16, "avx512_bf16"),
        ("aarch64", {"neon": True}, "neon"),
        ("arm64", {"neon": True, "bf16": True}, "neon_bf16"),
        ("aarch64", {**SVE, "sve_max_length": 32}, "sve256_bf16"),
        ("aarch64", {**SVE, "sve_max_length": 16}, "neon_bf16"),
        ("riscv64", {}, "riscv64"),
    ],
)
def test_the_best_level_of_a_processor_is_used(
    machine: str, features: dict[str, bool | int], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_processor(monkeypatch, machine, **features)
    assert native_level({}).name == best


@pytest.mark.parametrize(("is_allowed", "best"), [(True, "amx_bf16"), (False, "avx512_bf16")])
def test_amx_is_used_if_the_system_allows_it(is_allowed: bool, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_processor(monkeypatch, "x86_64", **AMX)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: is_allowed)
    assert native_level({}).name == best


def test_a_lower_level_can_be_forced_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    use_processor(monkeypatch, "x86_64", **AVX512)
    assert names(processor_levels()) == ["x86_64", "avx2", "avx512"]
    assert native_level({"LOOKONCE_NATIVE_LEVEL": "avx2"}).name == "avx2"
    assert native_level({"LOOKONCE_NATIVE_LEVEL": ""}).name == "avx512"
    for unusable in ("avx512_bf16", "neon", "AVX2", "avx"):
        with pytest.raises(ConfigurationError, match=f"'{unusable}'; this processor has x86_64, avx2, avx512$"):
            native_level({"LOOKONCE_NATIVE_LEVEL": unusable})
