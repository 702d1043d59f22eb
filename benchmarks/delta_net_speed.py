"""How fast is a gated delta net layer, with our kernel and without? `--help` lists the options.

One recurrent layer of Qwen3.5's sizes with random weights computes one token of each sequence, or a prompt, from states
in a pool. Each round computes the same tokens with both forms, in turns. Without our kernel, transformers' recurrent
and chunked forms read and write the states.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from benchmarks import report
from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata, SdpaBackend, forward_context
from decoder_svc.runner.cpu.attention import SOURCES
from decoder_svc.runner.cpu.native_delta import NativeDeltaStep
from decoder_svc.runner.recurrent.delta_net import DeltaStep
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels, RecurrentLayers
from decoder_svc.runner.state_step import PoolSizes, StateStep, state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.kernels.native_library import load_library

_NAME = "delta_net_speed"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WITHOUT, _OURS = "transformers", "ours"

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step: the time of each round by form of the layer, seconds."""

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
    config = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"], hidden_size=1024)
    if arguments.quick:
        arguments.rounds, arguments.sequences, arguments.prompts, arguments.dtypes = 1, [2], [5], ["float32"]
        config.linear_num_key_heads, config.linear_num_value_heads = 1, 2
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    steps = [(number, 1) for number in arguments.sequences] + [(1, length) for length in arguments.prompts]
    with torch.inference_mode():
        cells = [
            _cell(config, dtype, number, length, arguments.rounds)
            for dtype in arguments.dtypes
            for number, length in steps
        ]
    figures = {"cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(config, cells), is_quick=arguments.quick)


def _cell(config: Qwen3_5TextConfig, dtype: str, num_sequences: int, num_tokens: int, num_rounds: int) -> Cell:
    native = NativeDeltaStep(load_library(SOURCES), torch.get_num_threads())
    lengths = (num_tokens,) * num_sequences
    layers = {form: _layer(config, _DTYPES[dtype], lengths, step) for form, step in _steps(native).items()}
    cell = Cell(dtype, num_sequences, num_tokens, {form: [] for form in layers})
    for number in range(num_rounds + 1):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(1, sum(lengths), config.hidden_size, generator=generator).to(_DTYPES[dtype])
        for form in sorted(layers, reverse=number % 2 == 1):
            started_s = time.perf_counter()
            layers[form](inputs)
            # The first round is for the caches.
            if number:
                cell.layer_s[form].append(time.perf_counter() - started_s)
    print(dtype, num_sequences, num_tokens, round(statistics.median(cell.ratios), 2), flush=True)
    return cell


def _steps(native: NativeDeltaStep) -> dict[str, DeltaStep | None]:
    return {_WITHOUT: None, _OURS: native}


def _layer(config: Qwen3_5TextConfig, dtype: torch.dtype, lengths: Sequence[int], step: DeltaStep | None) -> Layer:
    """Returns a layer that computes so many tokens of each sequence, behind the first one."""
    num_sequences = len(lengths)
    torch.manual_seed(0)
    module = Qwen3_5GatedDeltaNet(config, 0).to(dtype)
    recurrent = RecurrentLayers(
        SimpleNamespace(layers=[SimpleNamespace(linear_attn=module)], config=config), dtype, RecurrentKernels(step)
    )
    recurrent.allocate(PoolSizes(num_sequences, 0), torch.device("cpu"))
    states = tuple(StateUse(slot, None, ()) for slot in range(num_sequences))
    kv_lens = tuple(1 + length for length in lengths)
    metadata = AttentionMetadata(
        full=BlockMetadata(torch.arange(sum(lengths)), (), ()),
        sliding=None,
        query_lens=tuple(lengths),
        kv_lens=kv_lens,
        mutual_spans=((),) * num_sequences,
        is_mutual_beyond_window=False,
        states=states,
        state_step=StateStep.of(state_arrays(states, kv_lens, lengths, recurrent.sizes), lambda one: one),
    )
    backend = SdpaBackend()

    def compute(hidden: Tensor) -> Tensor:
        with forward_context(backend, metadata):
            output: Tensor = module(hidden)
        return output

    return compute


def section(config: Qwen3_5TextConfig, cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.dtype,
            cell.num_sequences,
            cell.num_tokens,
            *(f"{1000 * statistics.median(cell.layer_s[form]):.2f} ms" for form in (_WITHOUT, _OURS)),
            f"{statistics.median(cell.ratios):.2f}",
            f"{min(cell.ratios):.2f} … {max(cell.ratios):.2f}",
        )
        for cell in cells
    ]
    head = ["dtype", "sequences", "tokens of each", "without our kernel", "with", "without ÷ with", "least … most"]
    return (
        f"## {_NAME}\n\nHow fast is a gated delta net layer, for single tokens and for a prompt? Hidden size "
        f"{config.hidden_size}, {config.linear_num_value_heads} states of {config.linear_key_head_dim} × "
        f"{config.linear_value_head_dim}.\nGoal: our kernel is faster.\n\n{report.table(head, rows)}\n\n"
        f"{len(cells[0].ratios)} interleaved rounds with different tokens, medians. The projections are PyTorch's in "
        "both forms."
    )


if __name__ == "__main__":
    main()
