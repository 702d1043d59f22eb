"""How fast is a recurrent layer, with our kernel and without? `--help` lists the options.

A gated delta net of Qwen3.5's sizes, a short convolution of LFM2's and a Mamba2 layer of Nemotron's, with random
weights, compute one token of each sequence, or a prompt, from states in a pool. Each round computes the same tokens
with both forms, in turns. Without our kernels, transformers' recurrent and chunked forms, or operators of PyTorch, read
and write the states.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import report
from benchmarks.recurrent_steps import move, one_layer_models, step_of
from decoder_svc.runner.cpu.attention import SOURCES
from decoder_svc.runner.cpu.native_convolution import NativeConvolutionStep
from decoder_svc.runner.cpu.native_delta import NativeDeltaStep
from decoder_svc.runner.cpu.native_mamba2 import NativeScanStep
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels
from lookonce.model.kernels.native_library import load_library

_NAME = "delta_net_speed"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WITHOUT, _OURS = "without", "ours"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step: the time of each round by form of the layer, seconds."""

    layer: str
    dtype: str
    num_sequences: int
    # New tokens of each sequence.
    num_tokens: int
    layer_s: dict[str, list[float]]

    @property
    def ratios(self) -> list[float]:
        """Time without our kernel divided by the time with it, by round."""
        return [one / own for one, own in zip(self.layer_s[_WITHOUT], self.layer_s[_OURS], strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="per cell (default: %(default)s)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32], help="with one token each")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 1024], help="tokens of a single sequence")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(_DTYPES))
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    hidden_size = 1024
    if arguments.quick:
        arguments.rounds, arguments.sequences, arguments.prompts, arguments.dtypes = 1, [2], [5], ["float32"]
        hidden_size = 64
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    steps = [(number, 1) for number in arguments.sequences] + [(1, length) for length in arguments.prompts]
    cells = []
    for name, text_model in one_layer_models(hidden_size).items():
        for dtype in arguments.dtypes:
            move(text_model, _CPU, _DTYPES[dtype])
            with torch.inference_mode():
                cells += [_cell(name, text_model, dtype, one, length, arguments.rounds) for one, length in steps]
    figures = {"cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(hidden_size, cells), is_quick=arguments.quick)


def _cell(name: str, text_model: Any, dtype: str, num_sequences: int, num_tokens: int, num_rounds: int) -> Cell:
    library, num_threads = load_library(SOURCES), torch.get_num_threads()
    forms = {
        _WITHOUT: RecurrentKernels(),
        _OURS: RecurrentKernels(
            NativeDeltaStep(library, num_threads),
            NativeConvolutionStep(library, num_threads),
            NativeScanStep(library, num_threads),
        ),
    }
    layers = {
        form: step_of(text_model, _DTYPES[dtype], kernels, num_sequences, num_tokens, _CPU)
        for form, kernels in forms.items()
    }
    cell = Cell(name, dtype, num_sequences, num_tokens, {form: [] for form in layers})
    size = text_model.config.hidden_size
    for number in range(num_rounds + 1):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(1, num_sequences * num_tokens, size, generator=generator).to(_DTYPES[dtype])
        for form in sorted(layers, reverse=number % 2 == 1):
            started_s = time.perf_counter()
            layers[form](inputs)
            # The first round is for the caches.
            if number:
                cell.layer_s[form].append(time.perf_counter() - started_s)
    print(name, dtype, num_sequences, num_tokens, round(statistics.median(cell.ratios), 2), flush=True)
    return cell


def section(hidden_size: int, cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.layer,
            cell.dtype,
            cell.num_sequences,
            cell.num_tokens,
            *(f"{1000 * statistics.median(cell.layer_s[form]):.2f} ms" for form in (_WITHOUT, _OURS)),
            f"{statistics.median(cell.ratios):.2f}",
            f"{min(cell.ratios):.2f} … {max(cell.ratios):.2f}",
        )
        for cell in cells
    ]
    head = [
        "layer", "dtype", "sequences", "tokens of each", "without our kernel", "with", "without ÷ with", "least … most"
    ]  # fmt: skip
    return (
        f"## {_NAME}\n\nHow fast is a recurrent layer, for single tokens and for a prompt? Hidden size {hidden_size}; "
        f"a gated delta net has {hidden_size // 32} states of 128 × 128, and a Mamba2 layer "
        "as many of 128 × 64.\nGoal: our kernels are faster.\n\n"
        f"{report.table(head, rows)}\n\n{len(cells[0].ratios)} interleaved rounds with different tokens, medians. The "
        "projections are PyTorch's in both forms."
    )


if __name__ == "__main__":
    main()
