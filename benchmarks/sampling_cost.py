"""What does sampling add to a decode step? `--help` lists the options.

The runner alone decodes batches in which every request samples in one way, each with a seed of its own, in turns with
greedy batches of the same size.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks import models, report
from benchmarks.runner_steps import RunnerSteps
from decoder_svc.scheduling.sampling_params import SamplingParams

_NAME = "sampling_cost"
_CONTEXT = 64
_GREEDY = SamplingParams()
_SAMPLED = SamplingParams(temperature=0.8)
KINDS = {
    "temperature": _SAMPLED,
    "top-p": dataclasses.replace(_SAMPLED, top_p=0.9),
    "top-k": dataclasses.replace(_SAMPLED, top_k=50),
    "min-p": dataclasses.replace(_SAMPLED, min_p=0.05),
    "penalties": dataclasses.replace(
        _SAMPLED, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2
    ),
    "biases": dataclasses.replace(_SAMPLED, logit_bias=tuple((token_id, -1.0) for token_id in range(100, 200))),
    "5 logprobs": dataclasses.replace(_SAMPLED, logprobs=5),
    "greedy with penalties": SamplingParams(repetition_penalty=1.1),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to sample in batches of one size: the median step of each round, seconds."""

    dtype: str
    kind: str
    batch: int
    greedy_s: list[float]
    sampled_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Time of a sampled step over that of a greedy one, by round."""
        return [one / other for one, other in zip(self.sampled_s, self.greedy_s, strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="per cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="per round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(_DTYPES))
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.batches, arguments.dtypes = 1, 2, [3], ["float32"]
    cells: list[Cell] = []
    for dtype in arguments.dtypes:
        folder = models.demo_model() if arguments.quick else models.small_llava(_DTYPES[dtype])
        bench = RunnerSteps(folder, _DTYPES[dtype], max(arguments.batches), _CONTEXT + arguments.steps + 2)
        cells += [
            _measured(bench, dtype, kind, batch, arguments.rounds, arguments.steps)
            for kind in KINDS
            for batch in arguments.batches
        ]
    figures = {"context": _CONTEXT, "cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(cells), is_quick=arguments.quick)


def _measured(bench: RunnerSteps, dtype: str, kind: str, batch: int, num_rounds: int, num_steps: int) -> Cell:
    """Takes turns, so that a busy machine hits both alike. The first round warms up and does not count."""
    cell = Cell(dtype, kind, batch, [], [])
    for number in range(num_rounds + 1):
        for is_sampled in (number % 2 == 0, number % 2 == 1):
            steps_s = bench.decode(bench.ours, batch, _CONTEXT, num_steps, KINDS[kind] if is_sampled else _GREEDY)
            if number:
                (cell.sampled_s if is_sampled else cell.greedy_s).append(statistics.median(steps_s))
    print(f"{dtype} {kind} batch {batch}: {statistics.median(cell.ratios):.3f}", flush=True)
    return cell


def section(cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.dtype,
            cell.kind,
            cell.batch,
            f"{1000 * statistics.median(cell.greedy_s):.1f} ms",
            f"{1000 * statistics.median(cell.sampled_s):.1f} ms",
            f"{statistics.median(cell.ratios):.3f}",
            f"{min(cell.ratios):.3f} … {max(cell.ratios):.3f}",
        )
        for cell in cells
    ]
    head = ["dtype", "sampling", "batch", "greedy step", "sampled step", "sampled ÷ greedy", "least … most"]
    return (
        f"## {_NAME}\n\nWhat does sampling add to a decode step? Goal: at most 10 % with 64 sampled requests.\n\n"
        f"{report.table(head, rows)}\n\n"
        f"Context {_CONTEXT}, a vocabulary of 49,152 tokens, temperature 0.8 but for the last row; "
        f"{len(cells[0].greedy_s)} interleaved rounds, medians."
    )


if __name__ == "__main__":
    main()
