"""How fast are decode steps with keys and values of 8 bits, and what do they take? `--help` lists the options.

The runner alone decodes the same batches with a KV cache in the model's type, and with one in int8, in turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks import models, report
from benchmarks.runner_steps import RunnerSteps

_NAME = "rounded_cache"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Cell:
    """Batches of one size and context: the median step of each round, seconds."""

    dtype: str
    batch: int
    context: int
    whole_s: list[float]
    rounded_s: list[float]
    # Memory that keys and values of one token take, bytes.
    whole_bytes: float
    rounded_bytes: float

    @property
    def ratios(self) -> list[float]:
        """Time of a step with the model's type divided by the time with int8, by round."""
        return [whole / own for whole, own in zip(self.whole_s, self.rounded_s, strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="per cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="per round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(_DTYPES))
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.dtypes = 1, 2, ["float32"]
        arguments.batches, arguments.contexts = [3], [40]
    cells = [cell for dtype in arguments.dtypes for cell in _cells(dtype, arguments)]
    report.publish(_NAME, {"cells": [asdict(cell) for cell in cells]}, section(cells), is_quick=arguments.quick)


def _cells(dtype: str, arguments: argparse.Namespace) -> list[Cell]:
    folder = models.demo_model() if arguments.quick else models.small_llava(_DTYPES[dtype])
    num_tokens = max(arguments.contexts) + arguments.steps + 2
    whole, rounded = (
        RunnerSteps(folder, _DTYPES[dtype], max(arguments.batches), num_tokens, rounds_kv_cache=is_rounded)
        for is_rounded in (False, True)
    )
    token_bytes = [
        spec.block_bytes / spec.block_size for spec in (bench.ours.get_kv_cache_spec() for bench in (whole, rounded))
    ]
    cells = []
    for batch in arguments.batches:
        for context in arguments.contexts:
            cell = Cell(dtype, batch, context, [], [], *token_bytes)
            for number in range(arguments.rounds + 1):
                sides = [(whole, cell.whole_s), (rounded, cell.rounded_s)]
                for bench, steps_s in sides[:: -1 if number % 2 else 1]:
                    seconds = bench.decode(bench.ours, batch, context, arguments.steps)
                    # The first round is for the caches.
                    if number:
                        steps_s.append(statistics.median(seconds))
            cells.append(cell)
            print(dtype, batch, context, round(statistics.median(cell.ratios), 2), flush=True)
    return cells


def section(cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.dtype,
            cell.batch,
            cell.context,
            f"{cell.whole_bytes / 1024:.1f} KiB",
            f"{cell.rounded_bytes / 1024:.1f} KiB",
            f"{1000 * statistics.median(cell.whole_s):.1f} ms",
            f"{1000 * statistics.median(cell.rounded_s):.1f} ms",
            f"{statistics.median(cell.ratios):.2f}",
            f"{min(cell.ratios):.2f} … {max(cell.ratios):.2f}",
        )
        for cell in cells
    ]
    head = [
        "dtype", "batch", "context", "token in the model's type", "in int8", "step, model's type", "step, int8",
        "model's type ÷ int8", "least … most",
    ]  # fmt: skip
    return (
        f"## {_NAME}\n\nHow fast are decode steps with keys and values of 8 bits (`--kv-cache-dtype int8`), and what "
        f"does a token take?\n\n{report.table(head, rows)}\n\n"
        f"Model small-llava; {len(cells[0].whole_s)} interleaved rounds, medians."
    )


if __name__ == "__main__":
    main()
