"""How long does the scheduler take to decide a step and to hash a long prompt? `--help` lists the options.

The scheduler alone, without a model: every running request decodes, the batch is full, and the rest of the queue waits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks import report
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.block_hash import BlockHasher
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.prompt import ImageItem, Prompt, Span
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import SchedulerLimits
from decoder_svc.scheduling.scheduler_output import SampledToken
from lookonce.content_key import (
    DEFAULT_TENANT,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)

_NAME = "scheduler_cost"
_NUM_RUNNING = (1, 64, 256)
_NUM_WAITING = (0, 100, 1000, 10_000)
_BLOCK_SIZE = 16
_PROMPT_TOKENS = 512
_IMAGE_TOKENS = 256
_LONG_PROMPT_TOKENS = 32_768
_MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """One queue length beside one batch."""

    num_running: int
    num_waiting: int
    # Median step of each round, µs.
    step_us: list[float]
    # Ratio of each round's step to the step with an empty queue.
    ratio: list[float]


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """The cost of all decisions about one uncached request, from admission to end."""

    # Each round's µs per request.
    with_prefix_cache_us: list[float]
    without_us: list[float]


@dataclass(frozen=True, slots=True)
class Hashing:
    """A long prompt that is asked for again and again."""

    num_tokens: int
    num_blocks: int
    # Blocks hashed in all calls together.
    num_hashed: int
    first_call_ms: float
    later_call_us: float


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps per round (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    num_running: tuple[int, ...] = _NUM_RUNNING
    num_waiting: tuple[int, ...] = _NUM_WAITING
    if arguments.quick:
        arguments.rounds, arguments.steps, num_running, num_waiting = 2, 2, (1, 4), (0, 100)
    costs = [
        cost
        for running in num_running
        for cost in measure(running, arguments.rounds, arguments.steps, num_waiting=num_waiting)
    ]
    hashing = measure_hashing()
    bookkeeping = measure_bookkeeping(arguments.rounds)
    figures = {
        "costs": [asdict(cost) for cost in costs],
        "hashing": asdict(hashing),
        "bookkeeping": asdict(bookkeeping),
    }
    report.publish(_NAME, figures, _section(costs, hashing, bookkeeping), is_quick=arguments.quick)


def measure(
    num_running: int, num_rounds: int, num_steps: int, *, num_waiting: Sequence[int] = _NUM_WAITING
) -> list[Cost]:
    """All queue lengths in turn, round after round, so that they share the machine's moods."""
    schedulers = {waiting: _loaded(num_running, waiting) for waiting in num_waiting}
    medians: dict[int, list[float]] = {waiting: [] for waiting in num_waiting}
    for _ in range(num_rounds):
        for waiting, scheduler in schedulers.items():
            medians[waiting].append(statistics.median(_step_us(scheduler) for _ in range(num_steps)))
    return [
        Cost(num_running, waiting, steps, [own / base for own, base in zip(steps, medians[0], strict=True)])
        for waiting, steps in medians.items()
    ]


def measure_hashing(num_calls: int = 100) -> Hashing:
    """A prompt of 32k tokens with an image, hashed by a request that is looked at in `num_calls` steps."""
    hasher = BlockHasher(_BLOCK_SIZE)
    request = _request("long", _LONG_PROMPT_TOKENS)
    durations_s = []
    for _ in range(num_calls):
        started_s = time.perf_counter()
        hasher.extend(request)
        durations_s.append(time.perf_counter() - started_s)
    return Hashing(
        num_tokens=_LONG_PROMPT_TOKENS,
        num_blocks=_LONG_PROMPT_TOKENS // _BLOCK_SIZE,
        num_hashed=hasher.num_hashed,
        first_call_ms=durations_s[0] * 1e3,
        later_call_us=statistics.median(durations_s[1:]) * 1e6,
    )


def measure_bookkeeping(num_rounds: int, num_requests: int = 40, num_output_tokens: int = 16) -> Bookkeeping:
    """Requests of 650 tokens, all at once, with the prefix cache and without, in turns."""
    found = Bookkeeping([], [])
    schedulers = {
        is_shared: Scheduler(
            SchedulerLimits(2048, 64, 8192, max_num_rows_asked=2048),
            KVCacheManager(num_blocks=2200, block_size=_BLOCK_SIZE, is_shared=is_shared),
            EncoderCacheManager(2064),
        )
        for is_shared in (True, False)
    }
    for number in range(num_rounds):
        for is_shared in (True, False) if number % 2 else (False, True):
            scheduler = schedulers[is_shared]
            for index in range(num_requests):
                name = f"round {number} {index} {is_shared}"
                scheduler.add(_request(name, 650, with_image=False, max_tokens=num_output_tokens))
            total_us = 0.0
            while scheduler.has_requests():
                total_us += _step_us(scheduler)
            (found.with_prefix_cache_us if is_shared else found.without_us).append(total_us / num_requests)
    return found


def _loaded(num_running: int, num_waiting: int) -> Scheduler:
    """A full batch in the middle of decoding, with a queue behind it."""
    num_tokens = num_running * _PROMPT_TOKENS
    scheduler = Scheduler(
        SchedulerLimits(num_tokens, num_running, 2 * _MAX_TOKENS, max_num_rows_asked=num_tokens),
        KVCacheManager(num_blocks=num_running * 128 + 1024, block_size=_BLOCK_SIZE),
        EncoderCacheManager(num_tokens),
    )
    for index in range(num_running):
        scheduler.add(_request(f"running {index}", _PROMPT_TOKENS, with_image=False))
    _step_us(scheduler)
    for index in range(num_waiting):
        scheduler.add(_request(f"waiting {index}", _PROMPT_TOKENS))
    assert (scheduler.num_running, scheduler.num_waiting) == (num_running, num_waiting)
    return scheduler


def _step_us(scheduler: Scheduler) -> float:
    """Decides one step and takes its result, in µs."""
    started_s = time.perf_counter()
    output = scheduler.schedule()
    decided_s = time.perf_counter() - started_s
    sampled = [SampledToken(chunk.request_id, 5, None) for chunk in output.chunks if chunk.samples]
    started_s = time.perf_counter()
    scheduler.update(output, sampled)
    return (decided_s + time.perf_counter() - started_s) * 1e6


_numbers = itertools.count()


def _request(name: str, num_tokens: int, *, with_image: bool = True, max_tokens: int = _MAX_TOKENS) -> Request:
    """Returns a unique prompt with a unique image in its middle."""
    number = next(_numbers)
    key = content_key(image_digest(name.encode()), EncoderFingerprint("f"), ProcessorOptions(), DEFAULT_TENANT)
    images = (ImageItem(key, Span(16, _IMAGE_TOKENS), _IMAGE_TOKENS, ProcessorOptions(), b"file"),)
    prompt = Prompt(tuple(range(number, number + num_tokens)), images if with_image else ())
    return Request(RequestId(name), prompt, SamplingParams(max_tokens=max_tokens), arrival_s=float(number))


def _section(costs: list[Cost], hashing: Hashing, bookkeeping: Bookkeeping) -> str:
    rows = [
        [
            cost.num_running,
            cost.num_waiting,
            f"{statistics.median(cost.step_us):.0f}",
            f"{statistics.median(cost.ratio):.2f}",
            f"{min(cost.ratio):.2f} … {max(cost.ratio):.2f}",
        ]
        for cost in costs
    ]
    head = ["running", "waiting", "µs per step (median)", "÷ nobody waiting", "least … most"]
    question = (
        "## scheduler_cost\n\nWhat does deciding a step cost, with the batch full and a queue behind it? Goal: flat\n"
        "in the waiting requests (ratio ≤ 1.1), and every block of a prompt hashed once."
    )
    note = (
        f"{len(costs[0].ratio)} interleaved rounds. A prompt of {hashing.num_tokens} tokens has {hashing.num_blocks} "
        f"blocks; in 100 look-ups\n{hashing.num_hashed} blocks were hashed: {hashing.first_call_ms:.1f} ms the first "
        f"time, {hashing.later_call_us:.1f} µs each time after.\n"
        f"All decisions about a request of 650 tokens and 16 tokens out, none of it cached: "
        f"{statistics.median(bookkeeping.with_prefix_cache_us):.0f} µs with the prefix cache\n"
        f"({min(bookkeeping.with_prefix_cache_us):.0f} … {max(bookkeeping.with_prefix_cache_us):.0f}), "
        f"{statistics.median(bookkeeping.without_us):.0f} without "
        f"({min(bookkeeping.without_us):.0f} … {max(bookkeeping.without_us):.0f})."
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{note}"


if __name__ == "__main__":
    main()
