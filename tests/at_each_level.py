"""Runs suites that compare numbers once at each level of kernels: `python -m tests.at_each_level [PYTEST_OPTION …]`.

The levels are those that this processor has. At a lower one than its own, PyTorch, oneDNN and MKL are limited as well,
so that trials choose as on such a processor. The suites check answers against `generate`, kernels against exact
results, and that batches of any size give equal bits (ADR 13).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from lookonce.model.kernels.native_level import processor_levels

SUITES = ("tests/parity", "tests/decoder_svc/runner", "tests/encoder_svc/vision")
# The instructions that PyTorch, oneDNN and MKL may use; levels that are not here leave them all.
_LIMITS = {
    "x86_64": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
_LIMITED = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def main(options: Sequence[str]) -> None:
    """Exits with 1 if a suite fails at some level."""
    levels = [level.name for level in processor_levels()]
    failed = []
    for level in levels:
        print(f"level {level}", flush=True)
        variables = {"LOOKONCE_NATIVE_LEVEL": level}
        if level != levels[-1]:
            variables |= dict(zip(_LIMITED, _LIMITS.get(level, ()), strict=False))
        command = [sys.executable, "-m", "pytest", *options, *SUITES]
        if subprocess.run(command, env=os.environ | variables, check=False).returncode != 0:
            failed.append(level)
    sys.exit(f"failed at: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
