"""What do LoRA adapters add to a decode step? `--help` lists the options.

The runner alone decodes batches whose requests have adapters in turn, and the same batches without any, in turns. Each
adapter changes all seven linear layers of every layer.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from safetensors.torch import save_file

from benchmarks import models, report
from benchmarks.runner_steps import RunnerSteps
from lookonce.model.adapter_folder import AdapterFolder
from lookonce.model.half_model import load_text_half, text_child

_NAME = "adapter_cost"
_CONTEXT = 64
_NUM_ADAPTERS = 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Cell:
    """Batches of one size with some adapters: the median step of each round, seconds."""

    dtype: str
    rank: int
    num_adapters: int
    batch: int
    base_s: list[float]
    adapted_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Speed of a batch with adapters over that of one without, by round."""
        return [one / other for one, other in zip(self.base_s, self.adapted_s, strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="per cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="per round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(_DTYPES))
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.batches, arguments.dtypes = 1, 2, [3], ["float32"]
        arguments.ranks = [4]
    cells: list[Cell] = []
    for dtype in arguments.dtypes:
        folder = models.demo_model() if arguments.quick else models.small_llava(_DTYPES[dtype])
        for rank in arguments.ranks:
            with tempfile.TemporaryDirectory() as scratch:
                adapters = _adapters(folder, pathlib.Path(scratch), rank)
                num_tokens = _CONTEXT + arguments.steps + 2
                bench = RunnerSteps(folder, _DTYPES[dtype], max(arguments.batches), num_tokens, adapters)
            fingerprints = [adapter.fingerprint for adapter in adapters]
            cells += [
                _measured(bench, Cell(dtype, rank, number, batch, [], []), fingerprints, arguments)
                for batch in arguments.batches
                for number in dict.fromkeys((1, min(batch, _NUM_ADAPTERS)))
            ]
    figures = {"context": _CONTEXT, "cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(cells), is_quick=arguments.quick)


def _adapters(model: pathlib.Path, scratch: pathlib.Path, rank: int) -> list[AdapterFolder]:
    """Writes adapters with random matrices for all linear layers of a model's language half."""
    half = load_text_half(model, torch.float32, "eager")
    prefix = f"model.{text_child(half)}."
    layers = {
        f"base_model.model.{name}": module
        for name, module in half.named_modules()
        if name.startswith(f"{prefix}layers.") and isinstance(module, torch.nn.Linear)
    }
    generator = torch.Generator().manual_seed(rank)
    found = []
    for index in range(_NUM_ADAPTERS):
        folder = scratch / str(index)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"})
        )
        tensors = {}
        for name, layer in layers.items():
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator) * 0.01
            tensors[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator) * 0.01
        save_file(tensors, folder / "adapter_model.safetensors")
        found.append(AdapterFolder.open(f"adapter-{index}", folder))
    return found


def _measured(bench: RunnerSteps, cell: Cell, adapters: Sequence[str], arguments: argparse.Namespace) -> Cell:
    """Takes turns, so that a busy machine hits both alike. The first round warms up and does not count."""
    for number in range(arguments.rounds + 1):
        for is_adapted in (number % 2 == 0, number % 2 == 1):
            chosen: Sequence[str | None] = adapters[: cell.num_adapters] if is_adapted else [None]
            steps_s = bench.decode(bench.ours, cell.batch, _CONTEXT, arguments.steps, adapters=chosen)
            if number:
                (cell.adapted_s if is_adapted else cell.base_s).append(statistics.median(steps_s))
    ratio = statistics.median(cell.ratios)
    print(f"{cell.dtype} rank {cell.rank} batch {cell.batch}, {cell.num_adapters} adapters: {ratio:.3f}", flush=True)
    return cell


def section(cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.dtype,
            cell.rank,
            cell.batch,
            cell.num_adapters,
            f"{1000 * statistics.median(cell.base_s):.1f} ms",
            f"{1000 * statistics.median(cell.adapted_s):.1f} ms",
            f"{statistics.median(cell.ratios):.3f}",
            f"{min(cell.ratios):.3f} … {max(cell.ratios):.3f}",
        )
        for cell in cells
    ]
    head = ["dtype", "rank", "batch", "adapters", "base step", "adapted step", "base ÷ adapted", "least … most"]
    return (
        f"## {_NAME}\n\nWhat do LoRA adapters of all linear layers cost in a decode step? Goal: at least 0.7 of the "
        f"base model's speed with {_NUM_ADAPTERS}.\n\n{report.table(head, rows)}\n\n"
        f"Context {_CONTEXT}; {len(cells[0].base_s)} interleaved rounds, medians."
    )


if __name__ == "__main__":
    main()
