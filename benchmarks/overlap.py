"""How much time does it save to compute a prompt while its later images are being encoded? `--help` lists the options.

Two stacks that differ in one setting of the decoder, `overlap_encode`, answer the same requests in turns, one at a
time: several new images, then a question. Encoder and decoder have separate CPUs, as on separate machines; on shared
CPUs they would only take time from each other. Times run from sending to the first token.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import psutil

from benchmarks import report
from benchmarks.models import demo_model, small_llava
from benchmarks.workloads import Ask, ask_about, picture
from lookonce.client import Client
from lookonce.local.local_stack import LocalStack

_NAME = "overlap"
_TIMEOUT_S = 300.0
_GOAL = 0.8
_ROWS_PER_IMAGE = 576


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token of one request on both stacks."""

    overlapped_s: float
    waiting_s: float
    # Time of the prefill alone: the same prompt again without the prefix cache, with its rows on the decoder.
    prompt_s: float

    @property
    def ratio(self) -> float:
        """Ratio of the time with overlap to the time without."""
        return self.overlapped_s / self.waiting_s

    @property
    def least_ratio(self) -> float:
        """The ratio of perfect overlap: the longer of encoding and prefill, over their sum."""
        return max(self.prompt_s, self.waiting_s - self.prompt_s) / self.waiting_s


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[4, 8], help="of a request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="per number of images (default: %(default)s)")
    parser.add_argument("--max-forward-images", type=int, help="of both encoders (default: the service's)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    model = demo_model() if arguments.quick else small_llava()
    if arguments.quick:
        arguments.images, arguments.rounds = [4], 1
    rounds = measure(
        model, arguments.images, arguments.rounds, arguments.max_forward_images, is_pinned=not arguments.quick
    )
    figures = {
        "model": model.name,
        "max_forward_images": arguments.max_forward_images,
        "images": {str(number): [asdict(one) for one in found] for number, found in rounds.items()},
    }
    report.publish(_NAME, figures, _section(model.name, rounds), is_quick=arguments.quick)


def measure(
    model: pathlib.Path, images: Sequence[int], num_rounds: int, max_forward_images: int | None, *, is_pinned: bool
) -> dict[int, list[Round]]:
    """Runs rounds for each number of images; the stacks take turns to come first.

    `is_pinned`: encoder and decoder have processors of their own.
    """
    rounds: dict[int, list[Round]] = {number: [] for number in images}
    with contextlib.ExitStack() as exits:
        overlapping, waiting = (
            exits.enter_context(_stack(model, flag, max(images), max_forward_images, is_pinned=is_pinned))
            for flag in ("--overlap-encode", "--no-overlap-encode")
        )
        clients = [
            exits.enter_context(Client.connect(stack.decoder_targets[0], timeout_s=_TIMEOUT_S))
            for stack in (overlapping, waiting)
        ]
        for number in range(-1, num_rounds):
            for num_images in images:
                rng = random.Random(f"{num_images}:{number}")
                ask = ask_about(rng, *(picture(rng) for _ in range(num_images)))
                found = _round(clients, ask, waiting_first=number % 2 == 1)
                # The first round warms up and is not counted.
                if number >= 0:
                    rounds[num_images].append(found)
                    print(f"{num_images} images, {number}: {found.ratio:.3f}, {found}", flush=True)
        for stack in (overlapping, waiting):
            encodes = int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))
            assert encodes == sum(images) * (num_rounds + 1), "an image was not encoded for its request"
    return rounds


def _stack(
    model: pathlib.Path, flag: str, max_images: int, max_forward_images: int | None, *, is_pinned: bool
) -> contextlib.AbstractContextManager[LocalStack]:
    cpus = sorted(os.sched_getaffinity(0))
    half = max(1, len(cpus) // 2)
    threads = ["--num-threads", str(half)]
    # Room for the rows of all images; otherwise later images would wait for earlier ones in any case.
    rows = ["--encoder-cache-rows", str((max_images + 1) * _ROWS_PER_IMAGE)]
    batch = [] if max_forward_images is None else ["--max-forward-images", str(max_forward_images)]
    stack = LocalStack(
        model,
        encoder_arguments=[*threads, *batch],
        decoder_arguments=[*threads, *rows, "--num-kv-blocks", "500", flag],
    )
    if not is_pinned:
        return stack
    return _on_own_cpus(stack, encoder=cpus[:half], decoder=cpus[-half:])


@contextlib.contextmanager
def _on_own_cpus(stack: LocalStack, encoder: Sequence[int], decoder: Sequence[int]) -> Iterator[LocalStack]:
    with stack:
        _pin(stack.encoders[0].pid, encoder)
        _pin(stack.decoders[0].pid, decoder)
        yield stack


def _pin(pid: int, cpus: Sequence[int]) -> None:
    """Pins all threads of the process and of its children to some CPUs."""
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        for thread in one.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cpus)


def _round(clients: Sequence[Client], ask: Ask, *, waiting_first: bool) -> Round:
    first_s = [0.0, 0.0]
    for index in (1, 0) if waiting_first else (0, 1):
        first_s[index] = _first_token_s(clients[index], ask)
    return Round(first_s[0], first_s[1], _first_token_s(clients[1], ask, bypass_prefix_cache=True))


def _first_token_s(client: Client, ask: Ask, *, bypass_prefix_cache: bool = False) -> float:
    started_s = time.perf_counter()
    with client.stream(
        ask.question,
        ask.pictures,
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        bypass_prefix_cache=bypass_prefix_cache,
    ) as stream:
        for _ in stream:
            pass
        return time.perf_counter() - started_s


def _section(model: str, rounds: dict[int, list[Round]]) -> str:
    head = ["images", "with overlap", "without", "ratio", "least … most", "perfect overlap", "prompt alone"]
    rows = [
        [
            num_images,
            f"{1000 * statistics.median(one.overlapped_s for one in found):.0f} ms",
            f"{1000 * statistics.median(one.waiting_s for one in found):.0f} ms",
            f"{statistics.median(one.ratio for one in found):.2f}",
            f"{min(one.ratio for one in found):.2f} … {max(one.ratio for one in found):.2f}",
            f"{statistics.median(one.least_ratio for one in found):.2f}",
            f"{1000 * statistics.median(one.prompt_s for one in found):.0f} ms",
        ]
        for num_images, found in rounds.items()
    ]
    question = (
        "## overlap\n\nTime to the first token where a prompt is computed while its later images are being encoded, "
        f"over that where all\nare waited for. Goal: at most {_GOAL:g}."
    )
    note = (
        f"Model `{model}`, unseen images, one request at a time, {len(next(iter(rounds.values())))} interleaved "
        "rounds, medians. Encoder and decoder have half of\nthe CPUs each. Perfect overlap: the longer of encoding "
        "and prompt over both one after the other."
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{note}"


if __name__ == "__main__":
    main()
