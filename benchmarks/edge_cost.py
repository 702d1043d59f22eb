"""What do gRPC, the SDK, tokenizing and text cost beside the engine? `--help` lists the options.

The same prompts go in turns to decoder services through the SDK, whose engines are a thread or a process, and as token
ids to an engine alone (`benchmarks.bare_engine`) with the same flags. All processes share this machine's CPUs, so the
services' figures include the client's CPU time. With one thread on two CPUs, client and front of a service have one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from benchmarks import models, report
from benchmarks.bare_engine import RequestTimes, TokenRequests
from benchmarks.text_service import TextService, told_prompts
from lookonce.aio import AsyncClient

_NAME = "edge_cost"
_MODELS = {"small-llava": models.small_llava, "demo": models.demo_model}
_ENGINES = ("thread", "process")
_TIMEOUT_S = 600.0
_KV_CACHE_BYTES = 1 << 30
_END_TIMEOUT_S = 60.0
# A round with one stream has this many requests, one after the other: the first one after a pause is slower.
_NUM_ALONE = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests through the service and in the bare engine."""

    service: RequestTimes
    bare: RequestTimes

    @property
    def extra_first_token_s(self) -> float:
        """Median time to first token minus that of the bare engine, seconds."""
        return statistics.median(self.service.first_token_s) - statistics.median(self.bare.first_token_s)

    @property
    def speed_ratio(self) -> float:
        """Tokens per second of the service over the bare engine's."""
        return self.bare.duration_s / self.service.duration_s


@dataclass(frozen=True, slots=True)
class Cell:
    """One model at one level of concurrency, with the engine at one place."""

    model: str
    # The place of the service's engine, "thread" or "process".
    engine: str
    num_threads: int
    num_streams: int
    # Tokens that each request generates.
    num_tokens: int
    pairs: list[Pair]

    def tokens_of(self, times: RequestTimes) -> int:
        """Tokens that all requests of a round generate."""
        return len(times.first_token_s) * self.num_tokens

    def edge_cpu_us(self, pair: Pair) -> tuple[float, float]:
        """CPU time of decoder and client per token, minus that of the bare engine; microseconds."""
        per_token = 1e6 / self.tokens_of(pair.bare)
        decoder_s = pair.service.engine_cpu_s - pair.bare.engine_cpu_s
        return decoder_s * per_token, pair.service.reader_cpu_s * per_token


def main() -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="per cell (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (default: %(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[report.this_machine().num_cpus], help="the engine's")
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS))
    report.add_quick(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens, arguments.streams, arguments.models = 2, 8, [1, 8], ["demo"]
    cells: list[Cell] = []
    for name in arguments.models:
        for num_threads in arguments.threads:
            pairs = asyncio.run(
                measure(_MODELS[name](), num_threads, arguments.streams, arguments.tokens, arguments.rounds)
            )
            for (engine, number), measured in pairs.items():
                cells.append(Cell(name, engine, num_threads, number, arguments.tokens, measured))
                print(_row(cells[-1]), flush=True)
    report.publish(_NAME, {"cells": [asdict(cell) for cell in cells]}, section(cells), is_quick=arguments.quick)


async def measure(
    folder: pathlib.Path, num_threads: int, streams: Sequence[int], num_tokens: int, num_rounds: int
) -> dict[tuple[str, int], list[Pair]]:
    """Runs interleaved rounds for each place of the engine and number of streams; the sides take turns to begin."""
    flags = ["--max-num-seqs", str(max(streams)), "--num-threads", str(num_threads)]
    flags += ["--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)]
    pairs: dict[tuple[str, int], list[Pair]] = {(engine, number): [] for engine in _ENGINES for number in streams}
    async with contextlib.AsyncExitStack() as stack:
        bare = stack.enter_context(BareEngine(folder, flags))
        services = {
            engine: stack.enter_context(TextService(folder, [*flags, "--engine", engine])) for engine in _ENGINES
        }
        clients = {
            engine: await stack.enter_async_context(AsyncClient.connect(service.target, timeout_s=_TIMEOUT_S))
            for engine, service in services.items()
        }
        # Equal prompts for both, each of which has seen them.
        for client in clients.values():
            prompts = await told_prompts(client, max(streams), random.Random(_NAME))
        token_ids = services["thread"].token_ids(prompts)
        # The garbage collector skips the imported modules: a real client has not imported a model builder.
        gc.collect()
        gc.freeze()
        # The first round warms the caches and is not counted.
        for number in range(num_rounds + 1):
            for (engine, num_streams), measured in pairs.items():
                requests = TokenRequests(token_ids[:num_streams], num_tokens)
                num_runs = _NUM_ALONE if num_streams == 1 else 1
                alone = joined([bare.run(requests) for _ in range(num_runs)]) if number % 2 else None
                served = joined(
                    [
                        await run_service(services[engine], clients[engine], prompts[:num_streams], num_tokens)
                        for _ in range(num_runs)
                    ]
                )
                pair = Pair(served, alone or joined([bare.run(requests) for _ in range(num_runs)]))
                if number:
                    measured.append(pair)
    gc.unfreeze()
    return pairs


async def run_service(
    service: TextService, client: AsyncClient, prompts: Sequence[str], num_tokens: int
) -> RequestTimes:
    """Sends all prompts at once, each read by its own task."""

    async def one(prompt: str) -> float:
        first_s = 0.0
        async with client.stream(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True) as stream:
            async for _ in stream:
                first_s = first_s or time.monotonic() - started_s
            assert len(stream.generation.token_ids) == num_tokens, "nothing ends a request early"
        return first_s

    cpu_s, own_cpu_s, started_s = service.cpu_s, time.process_time(), time.monotonic()
    first_token_s = await asyncio.gather(*(one(prompt) for prompt in prompts))
    duration_s = time.monotonic() - started_s
    own_cpu_s = time.process_time() - own_cpu_s
    return RequestTimes(tuple(first_token_s), duration_s, service.cpu_s - cpu_s, own_cpu_s)


def joined(runs: Sequence[RequestTimes]) -> RequestTimes:
    """The times of runs that followed one another."""
    first_token_s = tuple(first_s for run in runs for first_s in run.first_token_s)
    sums = (sum(values) for values in zip(*((r.duration_s, r.engine_cpu_s, r.reader_cpu_s) for r in runs), strict=True))
    return RequestTimes(first_token_s, *sums)


class BareEngine:
    """The bare engine's process, which lives until the block ends."""

    def __init__(self, folder: pathlib.Path, flags: Sequence[str]) -> None:
        """Takes the command-line flags of the decoder."""
        command = [sys.executable, "-m", "benchmarks.bare_engine", "--model", str(folder), *flags]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        self._line()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=_END_TIMEOUT_S)

    def run(self, requests: TokenRequests) -> RequestTimes:
        """Runs all requests to their end and returns their times."""
        assert self._process.stdin is not None, "a pipe"
        print(json.dumps(asdict(requests)), file=self._process.stdin, flush=True)
        return RequestTimes(**json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the bare engine has ended; its log is above")
        return line


def section(cells: Sequence[Cell]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    head = [
        "model",
        "engine",
        "threads",
        "streams",
        "tokens/s, service ÷ engine",
        "least … most",
        "first token later by",
        "least … most",
        "engine alone: first token, tokens/s",
        "CPU per token beside the engine's: decoder, client",
    ]
    question = (
        "## edge_cost\n\nWhat do gRPC, the SDK, tokenizing and text cost beside the engine? The same prompts, seen "
        "before, through the SDK and as\ntoken ids to an engine alone. The service's engine is a thread, or a process "
        "of its own. A round with one stream has\n"
        f"{_NUM_ALONE} requests, one after the other.\n"
        "Goal: the first token at most 3 ms later; at 64 streams 0.97 of the tokens per second where the engine leaves "
        "a CPU to\nclient and front (one thread on two CPUs), 0.93 where it does not."
    )
    return "\n\n".join([question, report.table(head, [_row(cell) for cell in cells])])


def _row(cell: Cell) -> list[str]:
    ratios = [pair.speed_ratio for pair in cell.pairs]
    later_ms = [1000 * pair.extra_first_token_s for pair in cell.pairs]
    bare_ms = 1000 * statistics.median(statistics.median(pair.bare.first_token_s) for pair in cell.pairs)
    tokens_per_s = statistics.median(cell.tokens_of(pair.bare) / pair.bare.duration_s for pair in cell.pairs)
    decoder_us, client_us = (
        statistics.median(values) for values in zip(*map(cell.edge_cpu_us, cell.pairs), strict=True)
    )
    return [
        cell.model,
        cell.engine,
        str(cell.num_threads),
        str(cell.num_streams),
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f} … {max(ratios):.3f}",
        f"{statistics.median(later_ms):.1f} ms",
        f"{min(later_ms):.1f} … {max(later_ms):.1f} ms",
        f"{bare_ms:.1f} ms, {tokens_per_s:.0f}/s",
        f"{decoder_us:.0f} µs, {client_us:.0f} µs",
    ]


if __name__ == "__main__":
    main()
