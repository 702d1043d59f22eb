"""Serves a model with the whole system on one device and asks it, for `benchmarks.gpu`."""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from lookonce.commands.running.found_encoders import wait_until_encoders_are_found
from lookonce.local.local_stack import LocalStack

NUM_TOKENS = 128
# Requests per caller after those to warm up, which are sent one after the other.
REQUESTS_EACH = 4
_NUM_WARM_UP = 2
# Callers of one client process: a process for all 64 would take as long as the service.
_CALLERS_EACH = 16
_TIMEOUT_S = 120.0
_COMMAND = "from lookonce.cli import main; main()"
_ENGINE = "decoder_svc.engine_worker"


def service_cells(
    folder: pathlib.Path, callers: Sequence[int], *, num_tokens: int = NUM_TOKENS, device: str = "auto"
) -> Iterator[dict[str, Any]]:
    """Yields the seconds of the start, and per number of callers the figures of `lookonce bench`.

    First every picture is new, then none is. Answers have `num_tokens` tokens. The processor time of each service per
    token of an answer is given in µs, that of the warm-up included.
    """
    began_s = time.perf_counter()
    with LocalStack(folder, device=device) as stack:
        wait_until_encoders_are_found(stack.decoder_targets)
        yield {"start_s": time.perf_counter() - began_s}
        for number in callers:
            for reuse in (0.0, 1.0):
                before = _processor_seconds(stack)
                cell = _bench(stack.decoder_targets[0], number, reuse, num_tokens)
                used = {name: after - before.get(name, 0.0) for name, after in _processor_seconds(stack).items()}
                each = {name: 1e6 * seconds / (REQUESTS_EACH * number * num_tokens) for name, seconds in used.items()}
                yield {"callers": number, "reuse": reuse, "tokens": num_tokens, "processor_us": each} | cell


def _processor_seconds(stack: LocalStack) -> dict[str, float]:
    """Returns the processor time so far of each service without its helpers, and of the decoder's engine."""
    found: dict[str, float] = {}
    for service in stack.services:
        process = psutil.Process(service.pid)
        engines = [child for child in process.children() if _ENGINE in child.cmdline()]
        for name, each in ((service.name, process), *(("engine", engine) for engine in engines)):
            times = each.cpu_times()
            found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def _bench(target: str, callers: int, reuse: float, num_tokens: int) -> dict[str, Any]:
    """Runs as many client processes at once as the callers need, and joins their figures."""
    num_clients = max(1, callers // _CALLERS_EACH)
    with tempfile.TemporaryDirectory() as directory:
        files = [pathlib.Path(directory) / f"report-{index}.json" for index in range(num_clients)]
        clients = [_client(target, callers // num_clients, reuse, num_tokens, file) for file in files]
        try:
            for client in clients:
                said, errors = client.communicate(timeout=_TIMEOUT_S)
                if client.returncode:
                    raise RuntimeError(f"lookonce bench ended with status {client.returncode}: {said} {errors}")
        finally:
            for client in clients:
                client.kill()
        reports = [json.loads(file.read_text("utf-8"))["report"] for file in files]
    joined = {name: sum(report[name] for report in reports) for name in ("num_failed", "completion_tokens_per_s")}
    for name in ("first_text_s", "latency_s"):
        median_s = statistics.median(report[name]["p50"] for report in reports)
        joined[name] = {"p50": median_s, "p99": max(report[name]["p99"] for report in reports)}
    kinds = reports[0]["image_rows"]
    return joined | {"image_rows": {kind: sum(report["image_rows"][kind] for report in reports) for kind in kinds}}


def _client(target: str, callers: int, reuse: float, num_tokens: int, file: pathlib.Path) -> subprocess.Popen[str]:
    options = ["--target", target, "--callers", callers, "--requests", REQUESTS_EACH * callers, "--reuse", reuse]
    options += ["--warm-up", _NUM_WARM_UP, "--ignore-eos", "--max-tokens", num_tokens, "--json", file]
    command = [sys.executable, "-c", _COMMAND, "bench", *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
