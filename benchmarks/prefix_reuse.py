"""What does the prefix cache gain where prompts repeat, and what does it cost where none does? `--help` for the knobs.

Two stacks of real services, one with the prefix cache and one without, asked in turns through the SDK; every round has
pictures and questions that nobody has seen before it. All requests of a round are sent at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import PIL.Image
import psutil

from benchmarks import report
from benchmarks.models import small_llava
from lookonce.client import Client
from lookonce.local_stack import LocalStack

_NAME = "prefix_reuse"
_TIMEOUT_S = 600.0
_MAX_TOKENS = 16
_PICTURE_SIDE = 448
# All requests of a round fit, and both stacks go through the same memory again and again. In a larger pool new blocks
# are cold memory with the cache and warm without (docs/log.md).
_NUM_KV_BLOCKS = 2200
_WORDS = "what colour is the small cat near that red boat and why do you see it under a tree".split()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a question about one picture."""

    picture: bytes
    question: str


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of requests, new for every round."""

    name: str
    description: str
    draw: Callable[[random.Random], list[Ask]]


def _p40(rng: random.Random) -> list[Ask]:
    """28 requests, 12 of them twice in a row."""
    asks = [_ask(_picture(rng), rng) for _ in range(28)]
    return [ask for index, ask in enumerate(asks) for _ in range(2 if index < 12 else 1)]


def _s50(rng: random.Random) -> list[Ask]:
    pictures = [_picture(rng) for _ in range(5)]
    return [_ask(pictures[index % 5], rng) for index in range(50)]


def u40(rng: random.Random) -> list[Ask]:
    """40 requests, each about a picture of its own."""
    return [_ask(_picture(rng), rng) for _ in range(40)]


WORKLOADS = (
    Workload("P40", "40 requests, 30 % of them repeated, one after the other", _p40),
    Workload("S50", "50 questions over 5 pictures, picture first", _s50),
    Workload("U40", "40 pictures, no reuse", u40),
)


@dataclass(frozen=True, slots=True)
class Round:
    """One workload on one stack."""

    num_requests: int
    # From the first request to the last answer, seconds.
    duration_s: float
    # User and system time of the decoder process meanwhile, seconds.
    decoder_cpu_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_encodes: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests with and without the prefix cache."""

    on: Round
    off: Round

    @property
    def speed_ratio(self) -> float:
        """Requests per second with the cache over without."""
        return self.off.duration_s / self.on.duration_s

    @property
    def cpu_ratio(self) -> float:
        """CPU time of the decoder with the cache over without."""
        return self.on.decoder_cpu_s / self.off.decoder_cpu_s


def main() -> None:
    """Measures every workload, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per workload and stack (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[one.name for one in WORKLOADS], help="names of workloads")
    arguments = parser.parse_args()
    model = small_llava()
    workloads = [one for one in WORKLOADS if one.name in arguments.only]
    pairs = measure(model, workloads, arguments.rounds)
    machine = report.this_machine()
    figures = {
        "model": model.name,
        "machine": asdict(machine),
        "workloads": {one.name: [asdict(pair) for pair in pairs[one.name]] for one in workloads},
    }
    path = report.write_json(_NAME, figures)
    report.write_section(_NAME, _section(model.name, workloads, pairs), machine)
    print(f"wrote {path} and {report.RESULTS}")


def measure(model: pathlib.Path, workloads: Sequence[Workload], num_rounds: int) -> dict[str, list[Pair]]:
    """Interleaved rounds; which stack begins changes from one to the next."""
    pairs: dict[str, list[Pair]] = {one.name: [] for one in workloads}
    with contextlib.ExitStack() as stacks:
        pool = ["--num-kv-blocks", str(_NUM_KV_BLOCKS)]
        on = stacks.enter_context(LocalStack(model, decoder_arguments=["--prefix-cache", *pool]))
        off = stacks.enter_context(LocalStack(model, decoder_arguments=["--no-prefix-cache", *pool]))
        warm_up = u40(random.Random("warm-up"))[:4]
        for stack in (on, off):
            _run(stack, warm_up)
        for number in range(num_rounds):
            for workload in workloads:
                asks = workload.draw(random.Random(f"{workload.name}:{number}"))
                order = (on, off) if number % 2 == 0 else (off, on)
                rounds = {id(stack): _run(stack, asks) for stack in order}
                pair = Pair(rounds[id(on)], rounds[id(off)])
                pairs[workload.name].append(pair)
                print(f"{workload.name} {number}: {pair.speed_ratio:.3f}, CPU {pair.cpu_ratio:.3f}, {pair}", flush=True)
    return pairs


def _run(stack: LocalStack, asks: Sequence[Ask]) -> Round:
    decoder = psutil.Process(stack.decoders[0].pid)
    encodes = _num_encodes(stack)
    together = threading.Barrier(len(asks) + 1)
    with (
        Client.connect(stack.decoder_targets[0], timeout_s=_TIMEOUT_S) as client,
        ThreadPoolExecutor(len(asks)) as pool,
    ):

        def one(ask: Ask) -> tuple[int, int]:
            together.wait(_TIMEOUT_S)
            usage = client.generate(
                ask.question, [ask.picture], max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True
            ).usage
            return usage.prompt_tokens, usage.cached_prompt_tokens

        answers = [pool.submit(one, ask) for ask in asks]
        cpu_s = _cpu_s(decoder)
        together.wait(_TIMEOUT_S)
        started_s = time.monotonic()
        tokens = [answer.result() for answer in answers]
        duration_s = time.monotonic() - started_s
    return Round(
        num_requests=len(asks),
        duration_s=duration_s,
        decoder_cpu_s=_cpu_s(decoder) - cpu_s,
        num_prompt_tokens=sum(prompt for prompt, _ in tokens),
        num_cached_tokens=sum(cached for _, cached in tokens),
        num_encodes=_num_encodes(stack) - encodes,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _num_encodes(stack: LocalStack) -> int:
    return int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))


def _ask(picture: bytes, rng: random.Random) -> Ask:
    return Ask(picture, " ".join(rng.choices(_WORDS, k=16)) + "?")


def _picture(rng: random.Random) -> bytes:
    """A JPEG of a smooth field of colours with a few boxes, as large as a photo of that size."""
    field = PIL.Image.frombytes("RGB", (8, 8), rng.randbytes(3 * 8 * 8))
    picture = field.resize((_PICTURE_SIDE, _PICTURE_SIDE), PIL.Image.Resampling.BICUBIC)
    for _ in range(6):
        left, top = rng.randrange(_PICTURE_SIDE - 32), rng.randrange(_PICTURE_SIDE - 32)
        right, bottom = left + rng.randrange(16, _PICTURE_SIDE // 2), top + rng.randrange(16, _PICTURE_SIDE // 2)
        picture.paste(tuple(rng.randbytes(3)), (left, top, right, bottom))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=90)
    return file.getvalue()


def _section(model: str, workloads: Sequence[Workload], pairs: dict[str, list[Pair]]) -> str:
    head = [
        "workload", "requests/s with", "without", "with ÷ without", "least … most", "decoder CPU, with ÷ without",
        "least … most", "prompt tokens cached", "encodes",
    ]  # fmt: skip
    rows = [[one.name, *_cells(pairs[one.name])] for one in workloads]
    lines = [f"* {one.name}: {one.description}." for one in workloads]
    question = (
        "## prefix_reuse\n\nWhat does the prefix cache gain where prompts repeat, and what does it cost where none "
        "does?\nGoal: at most 1 % where nothing repeats."
    )
    rounds = len(next(iter(pairs.values())))
    note = (
        f"Model `{model}` (576 rows per picture), {_MAX_TOKENS} tokens out, all requests of a round at once, a pool "
        f"of {_NUM_KV_BLOCKS} blocks;\n{rounds} interleaved rounds, medians.\n"
        "Encodes: images that went through the encoder in a round, with the cache."
    )
    return "\n\n".join([question, "\n".join(lines), report.table(head, rows), note])


def _cells(pairs: Sequence[Pair]) -> list[str]:
    speeds, cpus = [pair.speed_ratio for pair in pairs], [pair.cpu_ratio for pair in pairs]
    cached = statistics.median(pair.on.num_cached_tokens / pair.on.num_prompt_tokens for pair in pairs)
    return [
        f"{statistics.median(pair.on.num_requests / pair.on.duration_s for pair in pairs):.2f}",
        f"{statistics.median(pair.off.num_requests / pair.off.duration_s for pair in pairs):.2f}",
        f"{statistics.median(speeds):.3f}",
        f"{min(speeds):.3f} … {max(speeds):.3f}",
        f"{statistics.median(cpus):.3f}",
        f"{min(cpus):.3f} … {max(cpus):.3f}",
        f"{cached:.0%}",
        f"{statistics.median(pair.on.num_encodes for pair in pairs):g}",
    ]


if __name__ == "__main__":
    main()
