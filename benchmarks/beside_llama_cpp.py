"""How fast are decode steps beside llama.cpp's, with weights of 16, 8 and 4 bits? `--help` lists the options.

Both sides compute the same language model on the same CPUs in turns: our runner alone, and llama.cpp through its C
interface, each with the choice of the likeliest token. The first tokens behind some prompts are compared with those of
transformers, so that both are known to compute this model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from benchmarks import models, report
from benchmarks.runner_steps import RunnerSteps

_NAME = "beside_llama_cpp"
_WORKER = pathlib.Path(__file__).with_name("llama_cpp_worker.py")
_PYTHON_VARIABLE = "LOOKONCE_LLAMA_CPP_PYTHON"
# Our bits of a weight for each form of llama.cpp; None: 16.
_FORMS = {"F16": None, "Q8_0": 8, "Q4_0": 4}
_OUR_NAMES = {"F16": "bfloat16", "Q8_0": "int8", "Q4_0": "int4"}
_NUM_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One form, batch and context: the median step of each round, seconds."""

    form: str
    batch: int
    context: int
    ours_s: list[float]
    peers_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """The peer's time divided by ours, by round."""
        return [theirs / own for own, theirs in zip(self.ours_s, self.peers_s, strict=True)]


class LlamaCpp:
    """Runs llama.cpp in a process of its own and asks it."""

    def __init__(self, python: pathlib.Path, first: dict[str, Any]) -> None:
        """`first` is what its first line tells it. Raises RuntimeError if it does not start."""
        self._popen = subprocess.Popen(
            [str(python), str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self.ask(first)["version"]

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to one command."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        print(json.dumps(command), file=self._popen.stdin, flush=True)
        line = self._popen.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's process has ended with status {self._popen.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Closes its standard input and waits for its end."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait(30)


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="per round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument(
        "--peer-python",
        type=pathlib.Path,
        default=os.environ.get(_PYTHON_VARIABLE) or None,
        help=f"interpreter with llama-cpp-python, gguf and numpy (default: {_PYTHON_VARIABLE})",
    )
    arguments = parser.parse_args(given)
    if arguments.peer_python is None:
        sys.exit("--peer-python names no interpreter with llama-cpp-python: there is nothing to compare with")
    folder = models.small_llava(torch.bfloat16)
    max_batch, max_tokens = max(arguments.batches), max(arguments.contexts) + arguments.steps + 2
    with _peer(arguments.peer_python, folder, max_batch, max_tokens) as theirs:
        num_equal = _equal_first_tokens(folder, theirs)
        print(f"llama.cpp {theirs.version}: {num_equal} of {_NUM_PROMPTS} first tokens are those of transformers")
        cells = [cell for form in _FORMS for cell in _cells(form, folder, theirs, arguments, max_tokens)]
        version = theirs.version
    figures = {"version": version, "num_equal": num_equal, "cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(cells, version, num_equal), is_quick=False)


@contextlib.contextmanager
def _peer(python: pathlib.Path, folder: pathlib.Path, max_batch: int, max_tokens: int) -> Iterator[LlamaCpp]:
    with tempfile.TemporaryDirectory() as files:
        first = {
            "model": str(folder), "files": files, "forms": list(_FORMS), "num_threads": torch.get_num_threads(),
            "max_batch": max_batch, "max_tokens": max_tokens,
        }  # fmt: skip
        theirs = LlamaCpp(python, first)
        try:
            yield theirs
        finally:
            theirs.close()


def _equal_first_tokens(folder: pathlib.Path, theirs: LlamaCpp) -> int:
    """Returns how many first tokens of the peer, with weights of 16 bits, are those of transformers in float32."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    draw = random.Random(0)
    equal = 0
    for _ in range(_NUM_PROMPTS):
        prompt = [draw.randrange(300, 900) for _ in range(40)]
        with torch.inference_mode():
            expected = int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
        equal += theirs.ask({"form": "F16", "prompt": prompt})["token"] == expected
    return equal


def _cells(
    form: str, folder: pathlib.Path, theirs: LlamaCpp, arguments: argparse.Namespace, max_tokens: int
) -> Iterator[Cell]:
    bench = RunnerSteps(folder, torch.bfloat16, max(arguments.batches), max_tokens, quantize_bits=_FORMS[form])
    for context in arguments.contexts:
        for batch in arguments.batches:
            cell = Cell(form, batch, context, [], [])
            asked = {"form": form, "batch": batch, "context": context, "steps": arguments.steps}
            for number in range(arguments.rounds + 1):
                own = bench.decode(bench.ours, batch, context, arguments.steps)
                other = theirs.ask(asked)["steps_s"]
                # The first round is for the caches.
                if number:
                    cell.ours_s.append(statistics.median(own))
                    cell.peers_s.append(statistics.median(other))
            print(_row(cell), flush=True)
            yield cell


def section(cells: Sequence[Cell], version: str, num_equal: int) -> str:
    """Returns the section of RESULTS.md."""
    head = [
        "llama.cpp",
        "ours",
        "batch",
        "context",
        "ours: step",
        "llama.cpp: step",
        "llama.cpp ÷ ours",
        "least … most",
    ]
    return (
        f"## {_NAME}\n\nHow fast are decode steps beside llama.cpp's (llama-cpp-python {version}), with the language "
        "model of small-llava (Llama, 135M)? Goal: at least 1.0. Both choose the likeliest token, with "
        f"{torch.get_num_threads()} threads.\n\n{report.table(head, [_row(cell) for cell in cells])}\n\n"
        f"{len(cells[0].ours_s)} rounds in turns, medians. {num_equal} of {_NUM_PROMPTS} first tokens of llama.cpp "
        "with weights of 16 bits are those of transformers in float32. llama.cpp keeps keys and values in float16, "
        "ours in bfloat16."
    )


def _row(cell: Cell) -> list[str]:
    return [
        cell.form,
        _OUR_NAMES[cell.form],
        str(cell.batch),
        str(cell.context),
        f"{1000 * statistics.median(cell.ours_s):.1f} ms",
        f"{1000 * statistics.median(cell.peers_s):.1f} ms",
        f"{statistics.median(cell.ratios):.2f}",
        f"{min(cell.ratios):.2f} … {max(cell.ratios):.2f}",
    ]


if __name__ == "__main__":
    main()
