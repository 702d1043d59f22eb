"""How fast is a mixture of experts, by transformers and by our kernel? `--help` lists the options.

One layer of Qwen3-30B-A3B's sizes with random weights and random choices of experts. Each round computes the same
tokens with every form of the layer, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

from benchmarks import report
from decoder_svc.runner.cpu.attention import SOURCES, NativeBackend
from decoder_svc.runner.cpu.native_experts import NativeExperts
from lookonce.model.kernels.native_library import load_library
from lookonce.model.kernels.quantized_experts import Expert, ExpertWeights, experts_of
from lookonce.model.kernels.quantized_weight import quantized, whole

_NAME = "expert_speed"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HIDDEN, _MLP, _NUM_CHOSEN = 2048, 768, 8
_TRANSFORMERS = "transformers"
_BITS = {"ours": None, "ours, int8": 8, "ours, int4": 4}

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of tokens: the time of each round by form of the layer, seconds."""

    dtype: str
    num_tokens: int
    layer_s: dict[str, list[float]]

    def ratios(self, form: str) -> list[float]:
        """Time of transformers' layer divided by the time of this form, by round."""
        return [theirs / own for theirs, own in zip(self.layer_s[_TRANSFORMERS], self.layer_s[form], strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="per cell (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=64, help="of the layer (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(_DTYPES))
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.experts, arguments.tokens, arguments.dtypes = 1, 8, [3], ["float32"]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with torch.inference_mode():
        cells = [cell for dtype in arguments.dtypes for cell in _cells(dtype, arguments)]
    figures = {"experts": arguments.experts, "cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(cells, arguments.experts), is_quick=arguments.quick)


def _cells(dtype: str, arguments: argparse.Namespace) -> list[Cell]:
    layers = _layers(arguments.experts, _DTYPES[dtype])
    cells = []
    for num_tokens in arguments.tokens:
        cell = Cell(dtype, num_tokens, {form: [] for form in layers})
        for number in range(arguments.rounds + 1):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(num_tokens, _HIDDEN, generator=generator).to(_DTYPES[dtype])
            chosen = torch.rand(num_tokens, arguments.experts, generator=generator).topk(_NUM_CHOSEN).indices
            shares = torch.rand(num_tokens, _NUM_CHOSEN, generator=generator).to(_DTYPES[dtype])
            for form in sorted(layers, reverse=number % 2 == 1):
                started_s = time.perf_counter()
                layers[form](inputs, chosen, shares)
                # The first round is for the caches.
                if number:
                    cell.layer_s[form].append(time.perf_counter() - started_s)
        cells.append(cell)
        print(dtype, num_tokens, {form: round(statistics.median(cell.ratios(form)), 2) for form in layers}, flush=True)
    return cells


def _layers(num_experts: int, dtype: torch.dtype) -> dict[str, Layer]:
    """Returns the layer by transformers, as it is loaded by default, and by our kernel in each form."""
    config = Qwen3VLMoeTextConfig(hidden_size=_HIDDEN, moe_intermediate_size=_MLP, num_experts=num_experts)
    config._experts_implementation = "grouped_mm"
    module = Qwen3VLMoeTextExperts(config)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape) * _HIDDEN**-0.5).to(dtype)
    weights = experts_of(module)
    assert weights is not None, "the kernel knows these experts"
    backend = NativeBackend(load_library(SOURCES), torch.get_num_threads())
    ours = {form: NativeExperts(_rounded(weights, bits), backend) for form, bits in _BITS.items()}
    return {_TRANSFORMERS: module, **ours}


def _rounded(weights: ExpertWeights, bits: int | None) -> ExpertWeights:
    if bits is None:
        return weights

    def read(number: int) -> Expert:
        (gate, up), down = weights.read(number)
        gate, up, down = (quantized(whole(part), bits) for part in (gate, up, down))
        return (gate, up), down

    return replace(weights, read=read)


def section(cells: Sequence[Cell], num_experts: int) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.dtype,
            cell.num_tokens,
            form,
            f"{1000 * statistics.median(layer_s):.2f} ms",
            f"{statistics.median(cell.ratios(form)):.2f}",
            f"{min(cell.ratios(form)):.2f} … {max(cell.ratios(form)):.2f}",
        )
        for cell in cells
        for form, layer_s in cell.layer_s.items()
    ]
    head = ["dtype", "tokens", "experts by", "layer", "transformers ÷ layer", "least … most"]
    return (
        f"## {_NAME}\n\nHow fast is a mixture of experts? One layer with {num_experts} experts of {_HIDDEN} × {_MLP}, "
        f"of which {_NUM_CHOSEN} compute each token.\n\n{report.table(head, rows)}\n\n"
        f"{len(cells[0].layer_s[_TRANSFORMERS])} interleaved rounds with different tokens, medians. transformers "
        "computes with its default, `grouped_mm`."
    )


if __name__ == "__main__":
    main()
