"""How much does a frozen Redis slow down text requests? `--help` lists the options.

One decoder, one encoder and a Redis that is stopped (SIGSTOP) in every second phase. Text requests follow each other
without a pause; picture requests arrive at fixed times. Each picture request costs an encode in both kinds of phases:
with Redis the picture is new, and while Redis is frozen no cache can be asked.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import pathlib
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import PIL.Image

from benchmarks import report
from demo.chats import Message
from demo.evaluate import DemoModel
from demo.scenes import png_bytes, random_scene
from lookonce.client import Client
from lookonce.local.local_stack import LocalStack

_NAME = "frozen_redis"
_MODEL = pathlib.Path(__file__).parents[1] / "models/demo"
_GOAL = 1.1
_QUESTION = "What is in the picture?"
_TEXT_TOKENS = 16
_TIMEOUT_S = 60.0
_ONE_THREAD = ["--num-threads", "1"]
# Holds two pictures' rows of the demo model, so that earlier pictures are evicted before they return.
_LOCAL_CACHE_BYTES = 40_000
_DECODER_ROWS = 72
# Smallest logit distance between the best and the second-best token of a reference answer.
_MIN_MARGIN = 0.05
_FIRST_SEED = 88_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of each phase."""

    num_pictures: int
    # Seconds between the starts of two picture requests.
    interval_s: float
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG and the answer of plain `transformers` about it."""

    data: bytes
    answer: str


@dataclass(frozen=True, slots=True)
class Phase:
    """The figures of one phase, with Redis frozen or running."""

    num_texts: int
    # Time of one text request, seconds.
    median_s: float
    p99_s: float
    longest_s: float
    num_pictures: int
    num_right_pictures: int
    num_encodes: int
    longest_picture_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One phase of each kind."""

    normal: Phase
    frozen: Phase

    @property
    def ratio(self) -> float:
        """Ratio of the text requests' P99 with Redis frozen to that with Redis running."""
        return self.frozen.p99_s / self.normal.p99_s


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--pictures", type=int, default=20, help="per phase (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between pictures (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    load = Load(4, 0.1, 1) if arguments.quick else Load(arguments.pictures, arguments.interval, arguments.rounds)
    rounds = measure(load)
    figures = {
        "model": _MODEL.name,
        "load": asdict(load),
        "rounds": [asdict(one) for one in rounds],
    }
    report.publish(_NAME, figures, section(load, rounds), is_quick=arguments.quick)


def measure(load: Load) -> list[Round]:
    """Runs rounds of two phases, which take turns to come first."""
    unseen = _pictures()
    rounds = []
    with (
        LocalStack(
            _MODEL,
            encoder_arguments=[*_ONE_THREAD, "--local-cache-bytes", str(_LOCAL_CACHE_BYTES)],
            decoder_arguments=[*_ONE_THREAD, "--encoder-cache-rows", str(_DECODER_ROWS)],
        ) as stack,
        Client.connect(stack.decoder_targets[0], timeout_s=_TIMEOUT_S, max_retries=0) as client,
    ):
        _run(stack, client, _take(unseen, load), load)
        for number in range(load.num_rounds):
            new, cached = _take(unseen, load), _take(unseen, load)
            if number % 2 == 0:
                normal = _run(stack, client, new, load)
            for picture in cached:
                _ask_picture(client, picture)
            with _frozen(stack):
                frozen = _run(stack, client, cached, load)
            _wait_for_redis(client, next(unseen))
            if number % 2:
                normal = _run(stack, client, new, load)
            rounds.append(Round(normal, frozen))
            print(f"round {number}: {rounds[-1].ratio:.3f}, {rounds[-1]}", flush=True)
    return rounds


def _run(stack: LocalStack, client: Client, pictures: Sequence[Picture], load: Load) -> Phase:
    encodes = _num_encodes(stack)
    seconds: list[float] = []
    ended = threading.Event()
    asking = threading.Thread(target=_ask_texts, args=(client, ended, seconds))
    asking.start()
    num_right, longest_s = 0, 0.0
    try:
        started_s = time.monotonic()
        for number, picture in enumerate(pictures):
            time.sleep(max(0.0, started_s + number * load.interval_s - time.monotonic()))
            asked_s = time.perf_counter()
            num_right += _ask_picture(client, picture)
            longest_s = max(longest_s, time.perf_counter() - asked_s)
        time.sleep(max(0.0, started_s + len(pictures) * load.interval_s - time.monotonic()))
    finally:
        ended.set()
        asking.join()
    return Phase(
        num_texts=len(seconds),
        median_s=statistics.median(seconds),
        p99_s=quantile(seconds, 0.99),
        longest_s=max(seconds),
        num_pictures=len(pictures),
        num_right_pictures=num_right,
        num_encodes=_num_encodes(stack) - encodes,
        longest_picture_s=longest_s,
    )


def _ask_texts(client: Client, ended: threading.Event, seconds: list[float]) -> None:
    """Sends text requests one after another and appends the time of each."""
    number = 0
    while not ended.is_set():
        started_s = time.perf_counter()
        client.generate(f"Tell me about shape {number}.", max_tokens=_TEXT_TOKENS, temperature=0.0, ignore_eos=True)
        seconds.append(time.perf_counter() - started_s)
        number += 1


def _ask_picture(client: Client, picture: Picture) -> bool:
    """Returns whether the answer is right. The request bypasses the prefix cache."""
    answer = client.generate(
        _QUESTION, [picture.data], max_tokens=_TEXT_TOKENS, temperature=0.0, bypass_prefix_cache=True
    )
    return answer.text == picture.answer


@contextlib.contextmanager
def _frozen(stack: LocalStack) -> Iterator[None]:
    assert stack.redis is not None, "the stack has a Redis of its own"
    os.kill(stack.redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(stack.redis.pid, signal.SIGCONT)


def _wait_for_redis(client: Client, picture: Picture) -> None:
    """Waits until both services use Redis again: new rows are stored, and stored rows are found."""
    give_up_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < give_up_s:
        (uploaded,) = client.encode([picture.data])
        if uploaded.encoding is not None and uploaded.encoding.stored:
            usage = client.generate(_QUESTION, [picture.data], max_tokens=1, bypass_prefix_cache=True).usage
            if usage.encoded_image_tokens == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("Redis goes on and is not used again")


def _num_encodes(stack: LocalStack) -> int:
    return int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))


def _take(pictures: Iterator[Picture], load: Load) -> list[Picture]:
    return [next(pictures) for _ in range(load.num_pictures)]


def _pictures() -> Iterator[Picture]:
    """Yields new pictures without end, except those whose answer depends on rounding."""
    reference = DemoModel(_MODEL)
    message: Message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _QUESTION}]}
    for seed in random.Random(_FIRST_SEED).sample(range(_FIRST_SEED, 2 * _FIRST_SEED), 100_000):
        data = png_bytes(random_scene(seed, 1))
        ((answer, margin),) = reference.answer([[message]], [[PIL.Image.open(io.BytesIO(data))]])
        if margin >= _MIN_MARGIN:
            yield Picture(data, answer)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def section(load: Load, rounds: Sequence[Round]) -> str:
    """The Markdown of the results page."""
    normal, frozen = [one.normal for one in rounds], [one.frozen for one in rounds]
    ratios = [one.ratio for one in rounds]
    head = ["Redis", "text: median", "P99 (median of the rounds)", "least … most", "longest picture"]
    rows = [["runs", *_cells(normal)], ["frozen", *_cells(frozen)]]
    question = (
        "## frozen_redis\n\nWhat does a frozen Redis cost those who ask for text only? P99 of their requests, frozen "
        f"over normal.\nGoal: at most {_GOAL:g}."
    )
    verdict = f"P99, frozen ÷ normal: {statistics.median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})."
    texts = min(one.num_texts for one in [*normal, *frozen])
    note = (
        f"Model `{_MODEL.name}`, {len(rounds)} interleaved rounds; texts one at a time, at least {texts} a phase, "
        f"{_TEXT_TOKENS} tokens out;\npictures beside them, one every {load.interval_s:g} s. Answered as by plain "
        f"`transformers`: {_right(normal)} with Redis,\n{_right(frozen)} while it was frozen, with "
        f"{sum(one.num_encodes for one in frozen)} encodes although all of them had been cached."
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{verdict}\n{note}"


def _cells(phases: Sequence[Phase]) -> list[str]:
    p99s = [1000 * one.p99_s for one in phases]
    return [
        f"{1000 * statistics.median(one.median_s for one in phases):.1f} ms",
        f"{statistics.median(p99s):.1f} ms",
        f"{min(p99s):.1f} … {max(p99s):.1f} ms",
        f"{1000 * max(one.longest_picture_s for one in phases):.0f} ms",
    ]


def _right(phases: Sequence[Phase]) -> str:
    return f"{sum(one.num_right_pictures for one in phases)} of {sum(one.num_pictures for one in phases)}"


if __name__ == "__main__":
    main()
