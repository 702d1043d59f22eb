"""Runs suites that compare numbers once at each level of kernels: `python -m tests.at_each_level [PYTEST_OPTION …]`.

The levels are those that this processor has. PyTorch, oneDNN and MKL are limited as well, as far as they can be, so
that trials choose as on a processor of that level. The suites check answers against `generate`, kernels against exact
results, and that batches of any size give equal bits (ADR 13).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.forced_level import level_variables
from lookonce.model.kernels.native_level import processor_levels

SUITES = ("tests/parity", "tests/decoder_svc/runner", "tests/encoder_svc/vision")


def main(options: Sequence[str]) -> None:
    """Exits with 1 if a suite fails at some level."""
    command = [sys.executable, "-m", "pytest", *options, *SUITES]
    failed = []
    for level in processor_levels():
        print(f"level {level.name}", flush=True)
        variables = level_variables(level.name)
        if subprocess.run(command, env=os.environ | variables, check=False).returncode != 0:
            failed.append(level.name)
    sys.exit(f"failed at: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
