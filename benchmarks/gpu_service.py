"""Serves a model with the whole system on one device and asks it, for `benchmarks.gpu`."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lookonce.commands.running.found_encoders import wait_until_encoders_are_found
from lookonce.local.local_stack import LocalStack

_NUM_TOKENS = 128
# Requests per caller after one to warm up.
_REQUESTS_EACH = 4
_COMMAND = "from lookonce.cli import main; main()"


def service_cells(
    folder: pathlib.Path, callers: Sequence[int], *, num_tokens: int = _NUM_TOKENS, device: str = "auto"
) -> Iterator[dict[str, Any]]:
    """Yields the seconds of the start, and per number of callers the figures of `lookonce bench`.

    First every picture is new, then none is. Answers have `num_tokens` tokens.
    """
    began_s = time.perf_counter()
    with LocalStack(folder, device=device) as stack:
        wait_until_encoders_are_found(stack.decoder_targets)
        yield {"start_s": time.perf_counter() - began_s}
        for number in callers:
            for reuse in (0.0, 1.0):
                report = _bench(stack.decoder_targets[0], number, reuse, num_tokens)
                yield {"callers": number, "reuse": reuse, "tokens": num_tokens} | report


def _bench(target: str, callers: int, reuse: float, num_tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "report.json"
        options = ["--target", target, "--callers", callers, "--requests", _REQUESTS_EACH * callers, "--reuse", reuse]
        options += ["--warm-up", callers, "--ignore-eos", "--max-tokens", num_tokens, "--json", file]
        command = [sys.executable, "-c", _COMMAND, "bench", *map(str, options)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"lookonce bench ended with status {done.returncode}: {done.stdout} {done.stderr}")
        told = json.loads(file.read_text("utf-8"))
    names = ("num_failed", "duration_s", "completion_tokens_per_s", "first_text_s", "latency_s", "image_rows")
    return {name: told["report"][name] for name in names}
