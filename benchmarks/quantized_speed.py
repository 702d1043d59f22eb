"""How fast are decode steps with weights of 8 and 4 bits? `--help` lists the options.

The runner alone decodes the same batches with whole weights, with rounded ones and with those of quantized folders, in
turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks import models, report
from benchmarks.runner_steps import RunnerSteps

_NAME = "quantized_speed"
_CONTEXT = 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BITS = (None, 8, 4)
_WHOLE = "whole"
# They are names of `PUBLISHED_FORMS`.
_FORMATS = ("AWQ", "GPTQ", "W4A16", "W8A16", "W8A8", "float8")


@dataclass(frozen=True, slots=True)
class Cell:
    """Batches of one size: the median step of each round by form of the weights, seconds."""

    dtype: str
    batch: int
    steps_s: dict[str, list[float]]
    # Memory of the weights by form, bytes.
    weight_bytes: dict[str, int]

    def ratios(self, form: str) -> list[float]:
        """Time of a step with whole weights divided by the time with this form, by round."""
        return [whole / own for whole, own in zip(self.steps_s[_WHOLE], self.steps_s[form], strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="per cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="per round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(_DTYPES))
    parser.add_argument("--formats", nargs="*", default=list(_FORMATS), choices=_FORMATS, help="of quantized folders")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.batches, arguments.dtypes = 1, 2, [3], ["float32"]
    cells = [cell for dtype in arguments.dtypes for cell in _cells(dtype, arguments)]
    figures = {"context": _CONTEXT, "cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(cells), is_quick=arguments.quick)


def _cells(dtype: str, arguments: argparse.Namespace) -> list[Cell]:
    folder = models.demo_model() if arguments.quick else models.small_llava(_DTYPES[dtype])
    num_tokens = _CONTEXT + arguments.steps + 2
    most = max(arguments.batches)
    forms = {
        _WHOLE if bits is None else f"int{bits}": RunnerSteps(
            folder, _DTYPES[dtype], most, num_tokens, quantize_bits=bits
        )
        for bits in _BITS
    }
    for form in arguments.formats:
        forms[form] = RunnerSteps(models.stored_as(folder, form), _DTYPES[dtype], most, num_tokens)
    weight_bytes = {form: bench.ours.weight_bytes for form, bench in forms.items()}
    cells = []
    for batch in arguments.batches:
        cell = Cell(dtype, batch, {form: [] for form in forms}, weight_bytes)
        for number in range(arguments.rounds + 1):
            for form in sorted(forms, reverse=number % 2 == 1):
                steps_s = forms[form].decode(forms[form].ours, batch, _CONTEXT, arguments.steps)
                # The first round is for the caches.
                if number:
                    cell.steps_s[form].append(statistics.median(steps_s))
        cells.append(cell)
        print(dtype, batch, {form: round(statistics.median(cell.ratios(form)), 2) for form in forms}, flush=True)
    return cells


def section(cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.dtype,
            cell.batch,
            form,
            f"{cell.weight_bytes[form] / 1e6:.0f} MB",
            f"{1000 * statistics.median(steps_s):.1f} ms",
            f"{statistics.median(cell.ratios(form)):.2f}",
            f"{min(cell.ratios(form)):.2f} … {max(cell.ratios(form)):.2f}",
        )
        for cell in cells
        for form, steps_s in cell.steps_s.items()
    ]
    rounds = dict.fromkeys(f"{len(cell.steps_s[_WHOLE])} in {cell.dtype}" for cell in cells)
    head = ["dtype", "batch", "weights", "memory", "step", "whole ÷ step", "least … most"]
    return (
        f"## {_NAME}\n\nHow fast are decode steps with weights of 8 and 4 bits: `--quantize` (int8, int4), and of "
        "folders: AWQ, GPTQ and compressed-tensors with groups of 64 inputs (W4A16, W8A16) or a scale for each output "
        "(W8A8), and float8 with scales of 128 × 128 weights? Goals in bfloat16: 1.7 (int8) and 2.5 (int4) with one "
        f"request, 1.0 with 32.\n\n{report.table(head, rows)}\n\n"
        f"Context {_CONTEXT}; interleaved rounds ({', '.join(rounds)}), medians. The memory includes the "
        "embedding table, which stays whole. The output head gets 8 bits with `--quantize`, and "
        "is whole in the folders."
    )


if __name__ == "__main__":
    main()
