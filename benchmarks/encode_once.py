"""N decoders × M requests over K new pictures, all at once: how many encodes? `--help` lists the options.

Real services as processes of their own, asked through the SDK. Encodes are counted by the encoders themselves.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import PIL.Image

from benchmarks import report
from lookonce.client import Client
from lookonce.local.local_stack import LocalStack

_NAME = "encode_once"
_MODEL = pathlib.Path(__file__).parents[1] / "models/demo"
_PICTURE_SIDE = 96
_MAX_TOKENS = 4
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The number of replicas in one run."""

    num_encoders: int
    num_decoders: int


SETUPS = (Setup(1, 1), Setup(1, 2), Setup(1, 4), Setup(2, 2), Setup(4, 2))


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of each round."""

    # K: distinct pictures, new in every round.
    num_pictures: int
    # M: requests to each decoder, with one picture each.
    requests_per_decoder: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one burst of requests."""

    num_requests: int
    # Images that went through the encoders' models.
    num_encodes: int
    # From the first request to the last answer, seconds.
    duration_s: float


def main(given: Sequence[str] | None = None) -> None:
    """Measures every setup, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, default=_MODEL, help="model folder (default: the demo's)")
    parser.add_argument("--pictures", type=int, default=4, help="K, distinct pictures (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="M, requests per decoder (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="bursts per setup (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    setups = SETUPS[1:2] if arguments.quick else SETUPS
    load = Load(2, 4, 2) if arguments.quick else Load(arguments.pictures, arguments.requests, arguments.rounds)
    rounds = {setup: measure(arguments.model, setup, load) for setup in setups}
    figures = {
        "model": arguments.model.name,
        "load": asdict(load),
        "setups": [{**asdict(setup), "rounds": [asdict(one) for one in found]} for setup, found in rounds.items()],
    }
    report.publish(_NAME, figures, _section(arguments.model.name, load, rounds), is_quick=arguments.quick)


def measure(model: pathlib.Path, setup: Setup, load: Load) -> list[Round]:
    """Runs one setup's bursts against a stack of its own."""
    one_thread = ["--num-threads", "1"]
    with LocalStack(
        model,
        num_encoders=setup.num_encoders,
        num_decoders=setup.num_decoders,
        encoder_arguments=one_thread,
        decoder_arguments=one_thread,
    ) as stack:
        rounds = [_burst(stack, load, seed) for seed in range(load.num_rounds)]
    print(f"{setup}: encodes {[one.num_encodes for one in rounds]} for {load.num_pictures} pictures", flush=True)
    return rounds


def _burst(stack: LocalStack, load: Load, seed: int) -> Round:
    pictures = [_picture(seed * load.num_pictures + index) for index in range(load.num_pictures)]
    before = _num_encodes(stack)
    clients = [Client.connect(target, timeout_s=_TIMEOUT_S) for target in stack.decoder_targets]
    jobs = [
        (client, pictures[index % len(pictures)]) for index in range(load.requests_per_decoder) for client in clients
    ]
    together = threading.Barrier(len(jobs) + 1)

    def ask(client: Client, picture: bytes) -> None:
        together.wait(_TIMEOUT_S)
        client.generate("What is in the picture?", [picture], max_tokens=_MAX_TOKENS, temperature=0.0)

    with ThreadPoolExecutor(len(jobs)) as threads:
        answers = [threads.submit(ask, client, picture) for client, picture in jobs]
        together.wait(_TIMEOUT_S)
        started_s = time.monotonic()
        for answer in answers:
            answer.result()
        duration_s = time.monotonic() - started_s
    for client in clients:
        client.close()
    return Round(len(jobs), _num_encodes(stack) - before, duration_s)


def _num_encodes(stack: LocalStack) -> int:
    return int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))


def _picture(seed: int) -> bytes:
    """Returns a PNG of noise; each seed gives another picture."""
    size = (_PICTURE_SIDE, _PICTURE_SIDE)
    noise = random.Random(seed).randbytes(3 * _PICTURE_SIDE * _PICTURE_SIDE)
    file = io.BytesIO()
    PIL.Image.frombytes("RGB", size, noise).save(file, "PNG")
    return file.getvalue()


def _section(model: str, load: Load, rounds: dict[Setup, list[Round]]) -> str:
    head = ["encoders", "decoders", "requests", "pictures", "encodes (median)", "least … most", "burst (median)"]
    rows = [
        [
            setup.num_encoders,
            setup.num_decoders,
            measured[0].num_requests,
            load.num_pictures,
            f"{statistics.median(one.num_encodes for one in measured):g}",
            _spread([one.num_encodes for one in measured]),
            f"{statistics.median(one.duration_s for one in measured):.2f} s",
        ]
        for setup, measured in rounds.items()
    ]
    question = (
        "## encode_once\n\nN decoders × M requests over K unseen pictures, all at once: how many encodes? Goal: K."
    )
    note = (
        f"{load.num_rounds} bursts per setup, new pictures in each; model `{model}`; all processes share the machine.\n"
        "Encoders that meet the same new picture at the same moment agree over a lease in Redis on who encodes it."
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{note}"


def _spread(counts: Sequence[int]) -> str:
    return f"{min(counts)} … {max(counts)}"


if __name__ == "__main__":
    main()
