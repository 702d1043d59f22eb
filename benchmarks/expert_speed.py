"""How fast is a mixture of experts, by transformers and by our kernel? `--help` lists the options.

One layer of Qwen3-30B-A3B's sizes, or one with half of Llama 4 Scout's (its router and shared expert included), or one
of Nemotron 3 Nano's with fewer experts, which have no gates. Weights and choices of experts are random. Each round
computes the same tokens with every form of the layer, in turns.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

from benchmarks import report
from decoder_svc.runner.cpu.attention import SOURCES, NativeBackend
from decoder_svc.runner.cpu.native_experts import NativeExperts
from lookonce.model.kernels.native_library import load_library
from lookonce.model.kernels.quantized_experts import Expert, ExpertWeights, experts_of
from lookonce.model.kernels.quantized_weight import quantized, whole
from lookonce.model.structure.chosen_experts import choose_experts

_NAME = "expert_speed"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TRANSFORMERS = "transformers"
_BITS = {"ours": None, "ours, int8": 8, "ours, int4": 4}

# Takes tokens, and numbers and shares of their experts, which Llama 4's router chooses itself.
Layer = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a layer; `num_experts` is replaced by --experts."""

    hidden: int
    mlp: int
    num_experts: int
    num_chosen: int


# The real Nemotron 3 Nano has 128 experts, which in four forms of float32 would take 15 GB.
_SIZES = {
    "qwen3_vl_moe": Sizes(2048, 768, 64, 8),
    "llama4": Sizes(2560, 4096, 16, 1),
    "nemotron_h": Sizes(2688, 1856, 24, 6),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of tokens: the time of each round by form of the layer, seconds."""

    model: str
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
    parser.add_argument("--models", nargs="+", default=list(_SIZES), choices=list(_SIZES))
    parser.add_argument("--experts", type=int, help="of the layer (default: those of the model)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(_DTYPES))
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.experts, arguments.tokens, arguments.dtypes = 1, 2, [3], ["float32"]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with torch.inference_mode():
        cells = [
            cell for model in arguments.models for dtype in arguments.dtypes for cell in _cells(model, dtype, arguments)
        ]
    figures = {"experts": arguments.experts, "cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(cells), is_quick=arguments.quick)


def _cells(model: str, dtype: str, arguments: argparse.Namespace) -> list[Cell]:
    sizes = _SIZES[model]
    sizes = replace(sizes, num_experts=max(sizes.num_chosen, arguments.experts or sizes.num_experts))
    layers = _LAYERS[model](sizes, _DTYPES[dtype])
    cells = []
    for num_tokens in arguments.tokens:
        cell = Cell(model, dtype, num_tokens, {form: [] for form in layers})
        for number in range(arguments.rounds + 1):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(num_tokens, sizes.hidden, generator=generator).to(_DTYPES[dtype])
            chosen = torch.rand(num_tokens, sizes.num_experts, generator=generator).topk(sizes.num_chosen).indices
            shares = torch.rand(num_tokens, sizes.num_chosen, generator=generator).to(_DTYPES[dtype])
            for form in sorted(layers, reverse=number % 2 == 1):
                started_s = time.perf_counter()
                layers[form](inputs, chosen, shares)
                # The first round is for the caches.
                if number:
                    cell.layer_s[form].append(time.perf_counter() - started_s)
        cells.append(cell)
        print(
            model,
            dtype,
            num_tokens,
            {form: round(statistics.median(cell.ratios(form)), 2) for form in layers},
            flush=True,
        )
    return cells


def _qwen_layers(sizes: Sizes, dtype: torch.dtype) -> dict[str, Layer]:
    config = Qwen3VLMoeTextConfig(
        hidden_size=sizes.hidden, moe_intermediate_size=sizes.mlp, num_experts=sizes.num_experts
    )
    return _forms(Qwen3VLMoeTextExperts(config), dtype)


def _nemotron_layers(sizes: Sizes, dtype: torch.dtype) -> dict[str, Layer]:
    config = NemotronHConfig(
        hidden_size=sizes.hidden, moe_intermediate_size=sizes.mlp, n_routed_experts=sizes.num_experts
    )
    return _forms(NemotronHExperts(config), dtype)


def _forms(module: Any, dtype: torch.dtype) -> dict[str, Layer]:
    """Returns a layer by transformers, as it is loaded by default, and by our kernel in each form."""
    module.config._experts_implementation = "grouped_mm"
    _with_random_weights(module, dtype)
    ours = {form: _native(module, bits) for form, bits in _BITS.items()}
    return {_TRANSFORMERS: module, **ours}


def _llama_layers(sizes: Sizes, dtype: torch.dtype) -> dict[str, Layer]:
    """Returns the whole mixture by transformers, which computes all experts, and with the chosen ones by our kernel."""
    config = Llama4TextConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_chosen,
    )
    modules = torch.nn.ModuleList([_with_random_weights(Llama4TextMoe(config), dtype)])
    layers: dict[str, Layer] = {_TRANSFORMERS: functools.partial(_by_router, modules[0])}
    choose_experts(modules)
    for form, bits in _BITS.items():
        chosen = copy.copy(modules[0])
        # The copy has the same router and shared expert.
        chosen._modules = {**modules[0]._modules, "experts": _native(modules[0].experts, bits)}
        layers[form] = functools.partial(_by_router, chosen)
    return layers


def _by_router(mixture: Any, tokens: Tensor, _chosen: Tensor, _shares: Tensor) -> Any:
    return mixture(tokens)


_LAYERS = {"qwen3_vl_moe": _qwen_layers, "llama4": _llama_layers, "nemotron_h": _nemotron_layers}


def _with_random_weights(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5).to(dtype)
    return module


def _native(experts: torch.nn.Module, bits: int | None) -> NativeExperts:
    weights = experts_of(experts)
    assert weights is not None, "the kernel knows these experts"
    return NativeExperts(_rounded(weights, bits), NativeBackend(load_library(SOURCES), torch.get_num_threads()))


def _rounded(weights: ExpertWeights, bits: int | None) -> ExpertWeights:
    if bits is None:
        return weights

    def read(number: int) -> Expert:
        first, last = weights.read(number)
        return tuple(quantized(whole(part), bits) for part in first), quantized(whole(last), bits)

    return replace(weights, read=read)


def section(cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.model,
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
    head = ["model", "dtype", "tokens", "experts by", "layer", "transformers ÷ layer", "least … most"]
    kinds = ", ".join(
        f"{model}: {sizes.num_experts} of {sizes.hidden} × {sizes.mlp}, {sizes.num_chosen} for each token"
        for model, sizes in _SIZES.items()
        if any(cell.model == model for cell in cells)
    )
    return (
        f"## {_NAME}\n\nHow fast is a mixture of experts? One layer ({kinds}).\n\n{report.table(head, rows)}\n\n"
        f"{len(cells[0].layer_s[_TRANSFORMERS])} interleaved rounds with different tokens, medians. transformers "
        "computes all experts of llama4 for each token, and the others with its default, `grouped_mm`. The layer of "
        "llama4 includes its router and its shared expert, which PyTorch computes in all forms. Experts of nemotron_h "
        "have no gates; the real Nemotron 3 Nano has 128."
    )


if __name__ == "__main__":
    main()
