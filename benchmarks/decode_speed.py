"""How fast is a decode step, by attention backend and against what the memory allows? `--help` for the knobs.

The runner alone, without scheduler and services: every sequence has a context of its own and gets one token a step.
Backends take turns on one model and one KV pool, so that a busy machine hits all alike.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks import models, report
from decoder_svc.family import load_family
from decoder_svc.request import RequestId, SamplingParams
from decoder_svc.runner.attention import SdpaBackend
from decoder_svc.runner.base import RunnerConfig
from decoder_svc.runner.cpu import CPUModelRunner
from decoder_svc.runner.cpu_attention import NativeBackend
from decoder_svc.scheduler_output import AdmittedRequest, ScheduledChunk, SchedulerOutput
from decoder_svc.text_tokenizer import load_pretrained
from lookonce.model_folder import ModelFolder

_NAME = "decode_speed"
_BLOCK_SIZE = 16
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Large enough that no cache of the processor holds it.
_COPIED_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch with one length of context."""

    dtype: str
    batch: int
    context: int
    # Bytes that a step must read: the weights once, and each sequence's keys and values.
    read_bytes: int
    # Median step of each round by backend, seconds.
    steps_s: dict[str, list[float]]
    # How fast this machine read memory in each round, bytes per second.
    bandwidth: list[float]


def main() -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per cell and backend (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of a round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--dtypes", nargs="+", default=list(_DTYPES), choices=list(_DTYPES))
    arguments = parser.parse_args()
    cells = []
    for dtype in arguments.dtypes:
        bench = DecodeBench(dtype, max(arguments.batches), max(arguments.contexts) + arguments.steps + 2)
        for context in arguments.contexts:
            for batch in arguments.batches:
                cells.append(bench.measure(batch, context, arguments.rounds, arguments.steps))
                print(_row(cells[-1]), flush=True)
    machine = report.this_machine()
    report.write_json(_NAME, {"machine": asdict(machine), "cells": [asdict(cell) for cell in cells]})
    report.write_section(_NAME, section(cells), machine)


class DecodeBench:
    """One model with one KV pool, and every backend on it."""

    def __init__(self, dtype: str, max_batch: int, max_tokens: int, folder: pathlib.Path | None = None) -> None:
        """`max_tokens` bounds a sequence's context and what is decoded. `folder` None: small-llava."""
        self._dtype = dtype
        folder = folder or models.small_llava(_DTYPES[dtype])
        family = load_family(ModelFolder.open(folder), load_pretrained(folder))
        self._runner = CPUModelRunner(RunnerConfig(folder, _DTYPES[dtype], _BLOCK_SIZE, None), family)
        self._blocks_each = -(-max_tokens // _BLOCK_SIZE)
        self._runner.initialize_kv_cache(max_batch * self._blocks_each)
        native = self._runner.backend
        if not isinstance(native, NativeBackend):
            raise SystemExit("there is no native backend here, and so nothing to compare")
        plain = SdpaBackend()
        plain.share_pools(native)
        self._backends: dict[str, SdpaBackend] = {plain.name: plain, native.name: native}
        self._weight_bytes = sum(
            parameter.nbytes
            for name, parameter in self._runner.model.named_parameters()
            # Of the table of embeddings a step reads a row per token, unless it is the head, too.
            if "embed_tokens" not in name or self._runner.model.config.get_text_config().tie_word_embeddings
        )
        self._source = torch.ones(_COPIED_BYTES // 4, dtype=torch.float32)

    def measure(self, batch: int, context: int, num_rounds: int, num_steps: int) -> Cell:
        """All backends in turns."""
        spec = self._runner.get_kv_cache_spec()
        kv_bytes = batch * context * spec.block_bytes // spec.block_size
        steps_s: dict[str, list[float]] = {name: [] for name in self._backends}
        bandwidth = []
        for number in range(num_rounds + 1):
            for name in sorted(self._backends, reverse=number % 2 == 1):
                self._runner.backend = self._backends[name]
                seconds = self._decode(batch, context, num_steps)
                # The first round is for the caches.
                if number:
                    steps_s[name].append(statistics.median(seconds))
            if number:
                started_s = time.perf_counter()
                self._source.sum()
                bandwidth.append(_COPIED_BYTES / (time.perf_counter() - started_s))
        return Cell(self._dtype, batch, context, self._weight_bytes + kv_bytes, steps_s, bandwidth)

    def _decode(self, batch: int, context: int, num_steps: int) -> list[float]:
        """Seconds of each step after the first."""
        names = [RequestId(f"r{index}") for index in range(batch)]
        params = SamplingParams(max_tokens=num_steps + 2)
        admitted = tuple(AdmittedRequest(name, (5,) * context, context, (), None, (), params) for name in names)
        found = []
        for step in range(num_steps + 1):
            chunks = tuple(
                ScheduledChunk(
                    name,
                    context - 1 + step,
                    1,
                    0,
                    0,
                    self._blocks(index, context + num_steps) if step == 0 else (),
                    True,
                )
                for index, name in enumerate(names)
            )
            output = SchedulerOutput(admitted if step == 0 else (), chunks, (), (), ())
            started_s = time.perf_counter()
            self._runner.execute_model(output)
            found.append(time.perf_counter() - started_s)
        self._runner.execute_model(SchedulerOutput((), (), tuple(names), (), ()))
        return found[1:]

    def _blocks(self, index: int, num_tokens: int) -> tuple[int, ...]:
        first = index * self._blocks_each
        return tuple(range(first, first + -(-num_tokens // _BLOCK_SIZE)))


def section(cells: Sequence[Cell]) -> str:
    """The section of RESULTS.md."""
    head = ["dtype", "batch", "context", "sdpa", "native", "sdpa ÷ native", "least … most", "of the memory's speed"]
    question = (
        "## decode_speed\n\nHow fast is a decode step (small-llava: a Llama of 135M parameters), by attention backend? "
        "Last column: bytes\nthat the native step must read over what this machine reads in that time."
    )
    return "\n\n".join([question, report.table(head, [_row(cell) for cell in cells])])


def _row(cell: Cell) -> list[str]:
    plain, native = cell.steps_s["sdpa"], cell.steps_s["native"]
    ratios = [one / other for one, other in zip(plain, native, strict=True)]
    share = statistics.median(
        cell.read_bytes / seconds / speed for seconds, speed in zip(native, cell.bandwidth, strict=True)
    )
    return [
        cell.dtype,
        str(cell.batch),
        str(cell.context),
        f"{1000 * statistics.median(plain):.1f} ms",
        f"{1000 * statistics.median(native):.1f} ms",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} … {max(ratios):.2f}",
        f"{100 * share:.0f} %",
    ]


if __name__ == "__main__":
    main()
