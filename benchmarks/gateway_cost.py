"""What does the gateway cost beside the SDK? `--help` lists the options.

The same prompts go in turns to a decoder through the SDK, and through a gateway by a plain HTTP reader. All processes
share this machine's CPUs. Then the gateway holds streams whose decoder says nothing more, and its memory is read.
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
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio
import psutil

from benchmarks import models, report
from benchmarks.bare_engine import RequestTimes
from benchmarks.edge_cost import run_service
from benchmarks.text_service import TextService, told_prompts
from lookonce.aio import AsyncClient
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.sdk.connection.channel import DECODER

_NAME = "gateway_cost"
_MODELS = {"small-llava": models.small_llava, "demo": models.demo_model}
_KV_CACHE_BYTES = 1 << 30
_TIMEOUT_S = 600.0
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests through the SDK and through the gateway."""

    sdk: RequestTimes
    gateway: RequestTimes

    @property
    def extra_first_token_s(self) -> float:
        """Median time to first token minus that of the SDK, seconds."""
        return statistics.median(self.gateway.first_token_s) - statistics.median(self.sdk.first_token_s)

    @property
    def speed_ratio(self) -> float:
        """Tokens per second through the gateway over the SDK's."""
        return self.sdk.duration_s / self.gateway.duration_s


@dataclass(frozen=True, slots=True)
class Cell:
    """One model at one level of concurrency."""

    model: str
    num_threads: int
    num_streams: int
    num_tokens: int
    pairs: list[Pair]


@dataclass(frozen=True, slots=True)
class Idle:
    """The gateway's memory without streams and with streams that wait."""

    num_streams: int
    empty_bytes: int
    full_bytes: int


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell and the memory, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="per cell (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (default: %(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, report.this_machine().num_cpus], help="decoder's")
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS))
    parser.add_argument("--idle", type=int, default=1000, help="streams that wait (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.rounds, arguments.tokens, arguments.streams, arguments.models = 2, 8, [1, 4], ["demo"]
        arguments.threads, arguments.idle = [1], 50
    cells: list[Cell] = []
    for name in arguments.models:
        for num_threads in arguments.threads:
            pairs = asyncio.run(
                measure(_MODELS[name](), num_threads, arguments.streams, arguments.tokens, arguments.rounds)
            )
            cells += [Cell(name, num_threads, number, arguments.tokens, pairs[number]) for number in arguments.streams]
            for cell in cells[-len(pairs) :]:
                print(_row(cell), flush=True)
    idle = asyncio.run(hold_streams(arguments.idle))
    figures = {"cells": [asdict(cell) for cell in cells], "idle": asdict(idle)}
    report.publish(_NAME, figures, section(cells, idle), is_quick=arguments.quick)


async def measure(
    folder: pathlib.Path, num_threads: int, streams: Sequence[int], num_tokens: int, num_rounds: int
) -> dict[int, list[Pair]]:
    """Runs interleaved rounds for each number of streams; the sides take turns to begin."""
    flags = ["--max-num-seqs", str(max(streams)), "--num-threads", str(num_threads)]
    flags += ["--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)]
    pairs: dict[int, list[Pair]] = {number: [] for number in streams}
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(TextService(folder, flags))
        gateway = stack.enter_context(GatewayProcess(service.target))
        async with AsyncClient.connect(service.target, timeout_s=_TIMEOUT_S) as client:
            prompts = await told_prompts(client, max(streams), random.Random(_NAME))
            model = (await client.model_info()).model
            gc.collect()
            gc.freeze()
            # The first round warms connections and caches and is not counted.
            for number in range(num_rounds + 1):
                for num_streams in streams:
                    asked = prompts[:num_streams]
                    first = await run_gateway(gateway, model, asked, num_tokens) if number % 2 else None
                    sdk = await run_service(service, client, asked, num_tokens)
                    pair = Pair(sdk, first or await run_gateway(gateway, model, asked, num_tokens))
                    if number:
                        pairs[num_streams].append(pair)
    gc.unfreeze()
    return pairs


class GatewayProcess:
    """A gateway in its own process, which lives until the block ends."""

    def __init__(self, decoder_target: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ready_file = pathlib.Path(self._folder.name) / "ready.json"
        command = [sys.executable, "-m", "gateway_svc", "--listen", "127.0.0.1:0", "--log-level", "warning"]
        command += ["--decoder-target", decoder_target, "--ready-file", str(self._ready_file)]
        self._process = subprocess.Popen(command)
        self.port = 0

    def __enter__(self) -> GatewayProcess:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while not self._ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError("the gateway did not start; its log is above")
            time.sleep(0.02)
        self.port = int(json.loads(self._ready_file.read_text())["target"].rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    @property
    def cpu_s(self) -> float:
        """User and system time so far, seconds."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the process."""
        return int(psutil.Process(self._process.pid).memory_info().rss)


async def run_gateway(gateway: GatewayProcess, model: str, prompts: Sequence[str], num_tokens: int) -> RequestTimes:
    """Sends all prompts at once, each over a connection of its own."""
    cpu_s, own_cpu_s, started_s = gateway.cpu_s, time.process_time(), time.monotonic()

    async def one(prompt: str) -> float:
        first_s = 0.0
        async for _ in texts_of(gateway.port, _body(model, prompt, num_tokens)):
            first_s = first_s or time.monotonic() - started_s
        return first_s

    first_token_s = await asyncio.gather(*(one(prompt) for prompt in prompts))
    duration_s = time.monotonic() - started_s
    return RequestTimes(tuple(first_token_s), duration_s, gateway.cpu_s - cpu_s, time.process_time() - own_cpu_s)


async def texts_of(port: int, body: bytes) -> AsyncIterator[str]:
    """Yields the pieces of a streamed chat completion. Raises RuntimeError if it does not end as it should."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the gateway answered {status!r}")
        async for line in reader:
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                text = json.loads(line[6:])["choices"][0]["delta"].get("content")
                if text:
                    yield text
        raise RuntimeError("the stream broke off")
    finally:
        writer.close()


def _body(model: str, prompt: str, num_tokens: int) -> bytes:
    options = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}], **options}).encode()


class _Silent:
    """A decoder that says one word, and nothing more until it is told to. It offers the calls that are made here."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.may_end = asyncio.Event()

    def handlers(self) -> dict[str, Any]:
        """Returns the handlers of its calls by name."""
        return {
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                self._info, pb.GetModelInfoRequest.FromString, pb.GetModelInfoResponse.SerializeToString
            ),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(
                self._stream, pb.GenerateStreamRequest.FromString, pb.GenerateStreamResponse.SerializeToString
            ),
        }

    async def _info(self, request: pb.GetModelInfoRequest, context: object) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="silent", max_context_tokens=1000, max_images_per_prompt=1)

    async def _stream(
        self, request: pb.GenerateStreamRequest, context: object
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        yield pb.GenerateStreamResponse(started=pb.StreamStarted(request_id="x"))
        yield pb.GenerateStreamResponse(delta=pb.StreamDelta(text="word", token_ids=[0]))
        self.num_waiting += 1
        await self.may_end.wait()
        yield pb.GenerateStreamResponse(finished=pb.StreamFinished(finish_reason=pb.FINISH_REASON_STOP))


async def hold_streams(num_streams: int) -> Idle:
    """Reads the gateway's memory before and while it holds so many streams that wait for their next word."""
    server = grpc.aio.server()
    silent = _Silent()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(DECODER, silent.handlers())])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with GatewayProcess(f"127.0.0.1:{port}") as gateway:
        body = _body("silent", "hello", 10)
        empty_bytes = gateway.memory_bytes

        async def read() -> list[str]:
            return [text async for text in texts_of(gateway.port, body)]

        reading = [asyncio.create_task(read()) for _ in range(num_streams)]
        while silent.num_waiting < num_streams:
            await asyncio.sleep(0.05)
            if failed := [one for one in reading if one.done()]:
                failed[0].result()
        full_bytes = gateway.memory_bytes
        silent.may_end.set()
        assert await asyncio.gather(*reading) == [["word"]] * num_streams
    await server.stop(None)
    return Idle(num_streams, empty_bytes, full_bytes)


def section(cells: Sequence[Cell], idle: Idle) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    head = [
        "model",
        "decoder's threads",
        "streams",
        "tokens/s, gateway ÷ SDK",
        "least … most",
        "first token later by",
        "least … most",
        "SDK: first token, tokens/s",
        "the gateway's CPU per token",
    ]
    question = (
        f"## {_NAME}\n\nWhat does the gateway cost beside the SDK? The same prompts, seen before, through the SDK and "
        "as streamed chat\ncompletions. Goal: the first token at most 3 ms later, at most 5 % fewer tokens per second "
        "at 32 streams; 1,000 waiting\nstreams in at most 300 MB. All processes run on the same CPUs."
    )
    memory = (
        f"{idle.num_streams:,} streams that wait for their next word: {idle.full_bytes / 1e6:.0f} MB, "
        f"without any {idle.empty_bytes / 1e6:.0f} MB."
    )
    return "\n\n".join([question, report.table(head, [_row(cell) for cell in cells]), memory])


def _row(cell: Cell) -> list[str]:
    ratios = [pair.speed_ratio for pair in cell.pairs]
    later_ms = [1000 * pair.extra_first_token_s for pair in cell.pairs]
    first_ms = 1000 * statistics.median(statistics.median(pair.sdk.first_token_s) for pair in cell.pairs)
    num_tokens = cell.num_streams * cell.num_tokens
    speed = statistics.median(num_tokens / pair.sdk.duration_s for pair in cell.pairs)
    cpu_us = 1e6 * statistics.median(pair.gateway.engine_cpu_s for pair in cell.pairs) / num_tokens
    return [
        cell.model,
        str(cell.num_threads),
        str(cell.num_streams),
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f} … {max(ratios):.3f}",
        f"{statistics.median(later_ms):.1f} ms",
        f"{min(later_ms):.1f} … {max(later_ms):.1f} ms",
        f"{first_ms:.1f} ms, {speed:.0f}/s",
        f"{cpu_us:.0f} µs",
    ]


if __name__ == "__main__":
    main()
