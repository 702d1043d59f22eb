"""Runs a benchmark as on a processor with AVX2 but without AVX-512: `python -m benchmarks.forced_level decode_speed …`.

All sides are limited: our kernels by their level, PyTorch and the code that it generates, oneDNN and MKL by their own
variables, and the peer's libraries as in peer_without_avx512/. The figures stand in a section of their own.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

LEVEL = "avx2"
_LEVEL_VARIABLE = "LOOKONCE_NATIVE_LEVEL"
# The instructions that PyTorch, oneDNN and MKL may use at a level of our kernels, for levels that all of them can have.
_LIMITS = {
    "x86_64": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    LEVEL: {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
_PEERS_FOLDER = pathlib.Path(__file__).with_name("peer_without_avx512")


def main(arguments: Sequence[str]) -> None:
    """Replaces this process by the named benchmark, because libraries read the variables when they are loaded."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m benchmarks.forced_level BENCHMARK [ARGUMENT …]")
    command = [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]]
    os.execve(sys.executable, command, os.environ | level_variables(LEVEL))


def level_variables(level: str) -> dict[str, str]:
    """Returns the variables that limit our kernels, PyTorch, oneDNN and MKL to a level.

    At a level beyond those that all of them can have, only our kernels are limited.
    """
    return {_LEVEL_VARIABLE: level, **_LIMITS.get(level, {})}


def peer_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that limit the peer's processes as well; empty if no level is forced."""
    return {"PYTHONPATH": str(_PEERS_FOLDER)} if variables.get(_LEVEL_VARIABLE) == LEVEL else {}


if __name__ == "__main__":
    main(sys.argv[1:])
