"""How much longer does a decode step take beside processes that only compute? Goal: at most 3 × the quiet time.

The same steps of the model runner alone run in turns on the quiet machine and beside one busy process per CPU. Half of
each CPU is then the step's, so 2 × is the best that a fair scheduler allows. `--help` lists the options.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks import models, report
from benchmarks.runner_steps import RunnerSteps

_NAME = "busy_step"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CONTEXT = 64
_GOAL = 3.0
# From the start of the busy processes until they compute.
_SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class BusyCell:
    """One batch on the quiet machine and beside busy processes."""

    dtype: str
    batch: int
    # Mean step of each round, seconds.
    quiet_s: list[float]
    busy_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Busy time over quiet time of each round."""
        return [busy / quiet for busy, quiet in zip(self.busy_s, self.quiet_s, strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of a round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.batches = 1, 3, [1]
    cells = []
    for name, dtype in _DTYPES.items():
        folder = models.demo_model() if arguments.quick else models.small_llava(dtype)
        bench = RunnerSteps(folder, dtype, max(arguments.batches), _CONTEXT + arguments.steps + 2)
        for batch in arguments.batches:
            cells.append(measure(bench, name, batch, arguments.rounds, arguments.steps))
            print(_row(cells[-1]), flush=True)
    report.publish(_NAME, {"cells": [asdict(cell) for cell in cells]}, section(cells), is_quick=arguments.quick)


def measure(bench: RunnerSteps, dtype: str, batch: int, num_rounds: int, num_steps: int) -> BusyCell:
    """Measures steps on the quiet machine and beside busy processes in turns."""
    cell = BusyCell(dtype, batch, [], [])
    bench.decode(bench.ours, batch, _CONTEXT, 2)
    for _ in range(num_rounds):
        cell.quiet_s.append(statistics.fmean(bench.decode(bench.ours, batch, _CONTEXT, num_steps)))
        with busy_processes():
            cell.busy_s.append(statistics.fmean(bench.decode(bench.ours, batch, _CONTEXT, num_steps)))
    return cell


@contextlib.contextmanager
def busy_processes() -> Iterator[None]:
    """Runs one process per CPU that only computes."""
    count = len(os.sched_getaffinity(0))
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def section(cells: list[BusyCell]) -> str:
    """Returns the section of RESULTS.md."""
    head = ["type", "batch", "quiet", "beside busy processes", "busy ÷ quiet", "least … most"]
    return f"""## {_NAME}

Decode steps of the model runner alone, context {_CONTEXT}, on a quiet machine and beside one process per CPU that only
computes. Mean step of each round, medians of {len(cells[0].quiet_s)} rounds. Goal: at most {_GOAL:.0f} × the quiet
time.

{report.table(head, [_row(cell) for cell in cells])}"""


def _row(cell: BusyCell) -> list[str]:
    return [
        cell.dtype,
        str(cell.batch),
        f"{statistics.median(cell.quiet_s) * 1e3:.1f} ms",
        f"{statistics.median(cell.busy_s) * 1e3:.1f} ms",
        f"{statistics.median(cell.ratios):.2f}",
        f"{min(cell.ratios):.2f} … {max(cell.ratios):.2f}",
    ]


if __name__ == "__main__":
    main()
