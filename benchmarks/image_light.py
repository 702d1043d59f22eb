"""What does a separate encoder cost where few requests have an image and none repeats? `--help` lists the options.

The worst case for a split: one request in five has an image, and each image is new. A stack of services (decoder,
encoder, Redis) and one process with engine and encoder (`benchmarks.single_process`) answer the same requests in turns
through the SDK, all requests of a round at once.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks import report
from benchmarks.burst import ask_together
from benchmarks.models import demo_model, small_llava
from benchmarks.workloads import Ask, ask_about, picture
from lookonce.generation import Generation
from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import LocalStack

_NAME = "image_light"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 15.0
_IMAGE_EVERY = 5
_GOAL = 1.05
_NUM_KV_BLOCKS = 1000


@dataclass(frozen=True, slots=True)
class Side:
    """The figures of one round on one side."""

    # From the first request to the last answer, seconds.
    duration_s: float
    # Median of the requests' times from arrival to first token, seconds.
    first_token_s: float
    num_encoded_rows: int


@dataclass(frozen=True, slots=True)
class Round:
    """The same requests on both sides."""

    split: Side
    single: Side

    @property
    def ratio(self) -> float:
        """Ratio of the split system's time to that of the single process."""
        return self.split.duration_s / self.single.duration_s


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of each round."""

    num_requests: int
    max_tokens: int


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=40, help="of a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    model = demo_model() if arguments.quick else small_llava()
    load = Load(arguments.requests, arguments.tokens)
    if arguments.quick:
        load, arguments.rounds = Load(10, 4), 1
    rounds = measure(model, load, arguments.rounds)
    figures = {"model": model.name, "load": asdict(load), "rounds": [asdict(one) for one in rounds]}
    report.publish(_NAME, figures, _section(model.name, load, rounds), is_quick=arguments.quick)


def measure(model: pathlib.Path, load: Load, num_rounds: int) -> list[Round]:
    """Runs interleaved rounds; the sides take turns to begin."""
    rounds = []
    pool = ["--num-kv-blocks", str(_NUM_KV_BLOCKS)]
    with LocalStack(model, decoder_arguments=pool) as stack, _single_process(model, pool) as target:
        targets = [stack.decoder_targets[0], target]
        for number in range(-1, num_rounds):
            asks = _draw(random.Random(f"{_NAME}:{number}"), load.num_requests)
            sides: dict[int, Side] = {}
            for index in (0, 1) if number % 2 else (1, 0):
                sides[index] = _side(*ask_together([targets[index]], asks, load.max_tokens))
            if sides[0].num_encoded_rows != sides[1].num_encoded_rows or not sides[0].num_encoded_rows:
                raise AssertionError(f"not every image was encoded on both sides: {sides}")
            # The first round warms up and is not counted.
            if number >= 0:
                rounds.append(Round(sides[0], sides[1]))
                print(f"{number}: {rounds[-1].ratio:.3f}, {rounds[-1]}", flush=True)
    return rounds


@contextlib.contextmanager
def _single_process(model: pathlib.Path, arguments: Sequence[str]) -> Iterator[str]:
    """Starts the single process and yields its target."""
    with tempfile.TemporaryDirectory(prefix="lookonce-single-") as folder:
        flags = ["--model", str(model), *arguments]
        process = ChildProcess("single", "benchmarks.single_process", flags, pathlib.Path(folder))
        try:
            process.wait_until_ready(time.monotonic() + _START_TIMEOUT_S)
            yield process.ready.target
        finally:
            process.stop(_STOP_TIMEOUT_S)


def _draw(rng: random.Random, num_requests: int) -> list[Ask]:
    """Returns questions of 96 words; every fifth has a new picture before it."""
    asks = []
    for index in range(num_requests):
        pictures = () if index % _IMAGE_EVERY else (picture(rng),)
        question = " ".join(ask_about(rng).question for _ in range(6))
        asks.append(Ask(pictures, question))
    return asks


def _side(duration_s: float, answers: Sequence[Generation]) -> Side:
    first_token_s = statistics.median(answer.usage.time_to_first_token_s for answer in answers)
    return Side(duration_s, first_token_s, sum(answer.usage.encoded_image_tokens for answer in answers))


def _section(model: str, load: Load, rounds: Sequence[Round]) -> str:
    head = ["", "requests/s", "time to first token (median)"]
    rows = [
        [
            name,
            f"{statistics.median(load.num_requests / side.duration_s for side in sides):.2f}",
            f"{1000 * statistics.median(side.first_token_s for side in sides):.0f} ms",
        ]
        for name, sides in (
            ("decoder, encoder and Redis", [one.split for one in rounds]),
            ("encoder in the decoder's process", [one.single for one in rounds]),
        )
    ]
    ratios = [one.ratio for one in rounds]
    first = [one.split.first_token_s / one.single.first_token_s for one in rounds]
    question = (
        f"## image_light\n\nOne request in {_IMAGE_EVERY} has an image, and each image is new: time of a decoder with "
        f"an encoder service, over that of\nthe same engine with the encoder in its process. Goal: at most {_GOAL:g}."
    )
    note = (
        f"Time of a round, services ÷ one process: {statistics.median(ratios):.3f} ({min(ratios):.3f} … "
        f"{max(ratios):.3f}); median time to first token: {statistics.median(first):.3f}.\nModel `{model}`, "
        f"{load.num_requests} requests of a round at once, {load.max_tokens} tokens out, {len(rounds)} interleaved "
        "rounds. All processes share the machine's CPUs."
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{note}"


if __name__ == "__main__":
    main()
