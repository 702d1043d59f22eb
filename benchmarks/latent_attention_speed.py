"""How fast is the attention of one layer over latents, compared with all heads' keys and values? `--help` has options.

One token of each sequence, with the heads of Mistral Small 4 and of Kimi K2.5. Each round computes three forms in
turns: PyTorch's attention over expanded keys and values of all heads, which lie ready in memory; the absorbed form with
our kernel; and the absorbed form with PyTorch's operators over gathered latents. Expanded values are padded to the size
of keys, because PyTorch has no fast kernel for two sizes. The products with both halves of kv_b_proj are part of the
absorbed forms, and the expansion of the new token is part of the other one. Projections of hidden states are not
measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from decoder_svc.runner.attention import AttentionBackend
from decoder_svc.runner.attention_trial import AttentionTrial
from decoder_svc.runner.cpu.attention import SOURCES, HostSdpaBackend, NativeBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from lookonce.model.kernels.native_library import load_library
from lookonce.model.structure.latent_attention import LatentProjection

_NAME = "latent_attention_speed"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_EXPANDED, _OURS, _OPERATORS = "expanded", "ours", "operators"
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of a model's latent attention."""

    num_heads: int
    rank: int
    rotary_dim: int
    key_dim: int
    value_dim: int


_MODELS = {"Mistral Small 4": Heads(32, 256, 64, 64, 128), "Kimi K2.5": Heads(64, 512, 64, 128, 128)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step: the time of each round by form, seconds, and what a form keeps of a token, bytes."""

    model: str
    dtype: str
    num_sequences: int
    context: int
    step_s: dict[str, list[float]]
    token_bytes: dict[str, int]

    @property
    def ratios(self) -> list[float]:
        """Time of the expanded form divided by that of ours, by round."""
        return [one / own for one, own in zip(self.step_s[_EXPANDED], self.step_s[_OURS], strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="per cell (default: %(default)s)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="with one token each")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000], help="tokens of each sequence")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=list(_DTYPES))
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.sequences, arguments.contexts, arguments.dtypes = 1, [2], [40], ["float32"]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with torch.inference_mode():
        cells = [
            _cell(model, dtype, number, context, arguments.rounds)
            for model in _MODELS
            for dtype in arguments.dtypes
            for number in arguments.sequences
            for context in arguments.contexts
        ]
    figures = {"cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(cells), is_quick=arguments.quick)


def _cell(model: str, dtype: str, num_sequences: int, context: int, num_rounds: int) -> Cell:
    heads, element = _MODELS[model], _DTYPES[dtype]
    backends: dict[str, AttentionBackend] = {
        _OURS: NativeBackend(load_library(SOURCES), torch.get_num_threads()),
        _OPERATORS: HostSdpaBackend(),
    }
    forms = {name: _absorbed(heads, element, num_sequences, context, backend) for name, backend in backends.items()}
    forms[_EXPANDED] = _expanded(heads, element, num_sequences, context)
    expanded = 2 * heads.num_heads * (heads.key_dim + heads.rotary_dim) * element.itemsize
    latent = (heads.rank + heads.rotary_dim) * element.itemsize
    token_bytes = {_EXPANDED: expanded, _OURS: latent, _OPERATORS: latent}
    cell = Cell(model, dtype, num_sequences, context, {form: [] for form in forms}, token_bytes)
    for number in range(num_rounds + 1):
        for form in sorted(forms, reverse=number % 2 == 1):
            started_s = time.perf_counter()
            forms[form]()
            # The first round is for the caches.
            if number:
                cell.step_s[form].append(time.perf_counter() - started_s)
    print(model, dtype, num_sequences, context, round(statistics.median(cell.ratios), 2), flush=True)
    return cell


def _absorbed(
    heads: Heads, dtype: torch.dtype, num_sequences: int, context: int, backend: AttentionBackend
) -> Callable[[], Tensor]:
    size = heads.rank + heads.rotary_dim
    spec = KVCacheSpec(1, 1, size, dtype, _BLOCK_SIZE, value_dim=heads.rank)
    chunks = [(context, 1)] * num_sequences
    step = AttentionTrial(spec, heads.num_heads, chunks, torch.device("cpu")).prepared(backend, has_contents=False)
    projection = LatentProjection(_weight(heads, dtype), heads.num_heads, heads.key_dim, heads.value_dim)
    queries = _noise(heads.num_heads, num_sequences, heads.key_dim + heads.rotary_dim).to(dtype)

    def computed() -> Tensor:
        # The trial has queries of its own.
        projection.latent_queries(queries)
        return projection.values(step())

    return computed


def _expanded(heads: Heads, dtype: torch.dtype, num_sequences: int, context: int) -> Callable[[], Tensor]:
    """Keys and values of all heads are contiguous for each sequence, and the last place is that of the new token."""
    key_dim = heads.key_dim + heads.rotary_dim
    weight = _weight(heads, dtype)
    queries = _noise(num_sequences, heads.num_heads, 1, key_dim).to(dtype)
    latents, rotary = (_noise(num_sequences, size).to(dtype) for size in (heads.rank, heads.rotary_dim))
    keys = torch.zeros(num_sequences, heads.num_heads, context + 1, key_dim, dtype=dtype)
    values = torch.zeros(num_sequences, heads.num_heads, context + 1, key_dim, dtype=dtype)

    def computed() -> Tensor:
        new = F.linear(latents, weight).view(num_sequences, heads.num_heads, -1)
        keys[:, :, -1, : heads.key_dim] = new[..., : heads.key_dim]
        keys[:, :, -1, heads.key_dim :] = rotary[:, None]
        values[:, :, -1, : heads.value_dim] = new[..., heads.key_dim :]
        return F.scaled_dot_product_attention(queries, keys, values)[..., : heads.value_dim]

    return computed


def _weight(heads: Heads, dtype: torch.dtype) -> Tensor:
    weight = _noise(heads.num_heads * (heads.key_dim + heads.value_dim), heads.rank) / heads.rank**0.5
    return weight.to(dtype)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def section(cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""

    def shown(seconds: Sequence[float]) -> str:
        low, middle, high = (1000 * of(seconds) for of in (min, statistics.median, max))
        return f"{middle:.2f} ms ({low:.2f} … {high:.2f})"

    rows = [
        (
            cell.model,
            cell.dtype,
            cell.num_sequences,
            cell.context,
            *(shown(cell.step_s[form]) for form in (_EXPANDED, _OPERATORS, _OURS)),
            f"{statistics.median(cell.ratios):.2f}",
            f"{cell.token_bytes[_EXPANDED]:,} / {cell.token_bytes[_OURS]:,}",
        )
        for cell in cells
    ]
    head = [
        "heads of", "dtype", "sequences", "context", "expanded", "latents, PyTorch", "latents, ours", "expanded ÷ ours",
        "bytes of a token in a layer, expanded / latent",
    ]  # fmt: skip
    return (
        f"## {_NAME}\n\nHow fast is the attention of one layer over latents, compared with expanded keys and values of "
        f"all heads?\nGoal: ours is not slower.\n\n{report.table(head, rows)}\n\n{len(cells[0].ratios)} interleaved "
        "rounds; medians, and least … most. Projections of hidden states are not measured."
    )


if __name__ == "__main__":
    main()
