"""How does the decoder behave when more requests arrive than it can answer? `--help` lists the options.

One decoder, called through the SDK, with its engine in a thread, then one with a process for it. First 200 concurrent
requests (closed loop), which gives the speed at saturation; then Poisson arrivals at multiples of that speed. Every
request then has a deadline: twice the time that it takes when the batch is full. Measured are answers in time, the
delay of refusals, and that every request ends exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import pathlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks import models, report
from benchmarks.frozen_redis import quantile
from benchmarks.text_service import TextService, told_prompts
from lookonce.aio import AsyncClient
from lookonce.errors import DeadlineError, LookonceError, OverloadedError

_NAME = "overload"
_MODELS = {"small-llava": models.small_llava, "demo": models.demo_model}
_ENGINES = ("thread", "process")
# Timeout of a request without a meaningful deadline.
_TIMEOUT_S = 600.0
_NUM_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request; times are seconds of the monotonic clock."""

    sent_s: float
    answered_s: float
    # "ok", "refused" (RESOURCE_EXHAUSTED), "late" (DEADLINE_EXCEEDED), else the error's name.
    outcome: str


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one kind of load."""

    # Requests sent per second; None: as fast as answers arrive.
    rate: float | None
    # Answers in time per second, after the load has settled.
    goodput: float
    num_sent: int
    # Terminal answers by outcome.
    outcomes: dict[str, int]
    # Ended calls by the decoder's own count.
    num_seen_by_decoder: int
    # From sending to the refusal, of each that was refused.
    refused_s: tuple[float, ...]
    # Median time of the answers in time; None: there was none.
    answer_s: float | None

    @property
    def num_answered(self) -> int:
        """Number of requests that got a terminal answer."""
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class Load:
    """The load of each phase."""

    # Concurrent requests: at saturation, and with a full batch for the time of an answer.
    num_concurrent: int = 200
    num_running: int = 64
    # Shares of the speed at saturation; the last one is compared with the best.
    shares: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)
    duration_s: float = 20.0
    num_rounds: int = 3
    # Tokens that each request generates.
    num_tokens: int = 24
    # Ratio of the deadline to the time of a request when the batch is full.
    patience: float = 2.0


@dataclass(frozen=True, slots=True)
class Figures:
    """All measured figures of one run."""

    load: Load
    deadline_s: float
    full_batch: Phase
    closed: Phase
    # Rounds by share.
    open_loop: dict[float, list[Phase]]

    @property
    def goodput_ratios(self) -> list[float]:
        """Ratio of the goodput under the highest load to the best of the round, one per round."""
        rounds = zip(*self.open_loop.values(), strict=True)
        return [phases[-1].goodput / max(phase.goodput for phase in phases) for phases in rounds]

    @property
    def refused_s(self) -> list[float]:
        """Times to refusal under all loads, seconds."""
        return [seconds for phases in self.open_loop.values() for phase in phases for seconds in phase.refused_s]


def main() -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of arrivals at random (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of each load (default: %(default)s)")
    parser.add_argument("--model", default="small-llava", choices=list(_MODELS))
    parser.add_argument("--engines", nargs="+", default=list(_ENGINES), choices=list(_ENGINES))
    report.add_quick(parser)
    arguments = parser.parse_args()
    load = Load(num_rounds=arguments.rounds, duration_s=arguments.seconds)
    if arguments.quick:
        arguments.model = "demo"
        load = Load(num_concurrent=24, num_running=8, shares=(0.5, 2.0), duration_s=2.0, num_rounds=1, num_tokens=16)
        arguments.engines = ["thread"]
    folder = _MODELS[arguments.model]()
    figures = {engine: asyncio.run(measure(folder, load, engine)) for engine in arguments.engines}
    report.publish(
        _NAME,
        {"model": arguments.model, "engines": {engine: condensed(found) for engine, found in figures.items()}},
        section(arguments.model, figures),
        is_quick=arguments.quick,
    )


async def measure(folder: pathlib.Path, load: Load, engine: str) -> Figures:
    """All loads against one decoder, whose engine is a "thread" or a "process"."""
    print(f"engine in a {engine}", flush=True)
    with TextService(folder, ["--max-num-seqs", str(load.num_running), "--engine", engine]) as service:
        async with AsyncClient.connect(service.target, timeout_s=_TIMEOUT_S, max_retries=0) as client:
            rng = random.Random(_NAME)
            asker = _Asker(client, await told_prompts(client, _NUM_PROMPTS, rng), load.num_tokens)
            gc.collect()
            gc.freeze()
            # All requests begin together, so wait another half of the duration until they are out of step.
            settling_s = load.duration_s / 2
            asks = _closed_loop(asker, load.num_running, load.duration_s + settling_s)
            full_batch = await _phase(service, asks, None, settling_s)
            print(f"full batch: {full_batch.goodput:.1f} answers/s", flush=True)
            asks = _closed_loop(asker, load.num_concurrent, load.duration_s + settling_s)
            closed = await _phase(service, asks, None, settling_s)
            print(f"{load.num_concurrent} at a time: {closed.goodput:.1f} answers/s", flush=True)
            assert full_batch.answer_s is not None, "nobody was refused"
            deadline_s = load.patience * full_batch.answer_s
            open_loop: dict[float, list[Phase]] = {share: [] for share in load.shares}
            for share in itertools.chain.from_iterable([load.shares] * load.num_rounds):
                rate = share * closed.goodput
                requests = _open_loop(asker, rate, load.duration_s + deadline_s, deadline_s, rng)
                open_loop[share].append(await _phase(service, requests, rate, deadline_s))
                print(f"{share} of it: {open_loop[share][-1].outcomes}", flush=True)
            gc.unfreeze()
    return Figures(load, deadline_s, full_batch, closed, open_loop)


class _Asker:
    """Sends requests and records their outcomes."""

    def __init__(self, client: AsyncClient, prompts: Sequence[str], num_tokens: int) -> None:
        self._client = client
        self._prompts = itertools.cycle(prompts)
        self._num_tokens = num_tokens
        self._is_stream = itertools.cycle([False, True])

    async def ask(self, timeout_s: float) -> Answer:
        """Sends one request; unary and streaming calls take turns."""
        prompt, is_stream, sent_s = next(self._prompts), next(self._is_stream), time.monotonic()
        try:
            await self._answered(prompt, timeout_s, is_stream=is_stream)
            outcome = "ok"
        except OverloadedError:
            outcome = "refused"
        except DeadlineError:
            outcome = "late"
        except LookonceError as error:
            outcome = type(error).__name__
        return Answer(sent_s, time.monotonic(), outcome)

    async def _answered(self, prompt: str, timeout_s: float, *, is_stream: bool) -> None:
        if not is_stream:
            await self._client.generate(
                prompt, max_tokens=self._num_tokens, temperature=0.0, ignore_eos=True, timeout_s=timeout_s
            )
            return
        async with self._client.stream(
            prompt, max_tokens=self._num_tokens, temperature=0.0, ignore_eos=True, timeout_s=timeout_s
        ) as stream:
            async for _ in stream:
                pass


_Requests = Callable[[], Awaitable[list[Answer]]]


def _closed_loop(asker: _Asker, num_concurrent: int, duration_s: float) -> _Requests:
    async def run() -> list[Answer]:
        end_s = time.monotonic() + duration_s

        async def one() -> list[Answer]:
            answers = []
            while time.monotonic() < end_s:
                answers.append(await asker.ask(_TIMEOUT_S))
            return answers

        return [
            answer for answers in await asyncio.gather(*(one() for _ in range(num_concurrent))) for answer in answers
        ]

    return run


def _open_loop(asker: _Asker, rate: float, duration_s: float, timeout_s: float, rng: random.Random) -> _Requests:
    async def run() -> list[Answer]:
        began_s, due_s, tasks = time.monotonic(), 0.0, []
        while (due_s := due_s + rng.expovariate(rate)) < duration_s:
            await asyncio.sleep(began_s + due_s - time.monotonic())
            tasks.append(asyncio.create_task(asker.ask(timeout_s)))
        return await asyncio.gather(*tasks)

    return run


async def _phase(service: TextService, requests: _Requests, rate: float | None, settling_s: float) -> Phase:
    """Runs a load. Its goodput leaves out the first `settling_s`, in which queues fill."""
    seen = _num_ended(service)
    answers = await requests()
    in_time = [answer for answer in answers if answer.outcome == "ok"]
    begin_s = min(answer.sent_s for answer in answers) + settling_s
    end_s = max(answer.sent_s for answer in answers)
    num_counted = sum(begin_s <= answer.answered_s <= end_s for answer in in_time)
    outcomes: dict[str, int] = {}
    for answer in answers:
        outcomes[answer.outcome] = outcomes.get(answer.outcome, 0) + 1
    # The client may see a passed deadline before the decoder does.
    for _ in range(100):
        if _num_ended(service) - seen >= len(answers):
            break
        await asyncio.sleep(0.05)
    return Phase(
        rate=rate,
        goodput=num_counted / (end_s - begin_s),
        num_sent=len(answers),
        outcomes=outcomes,
        num_seen_by_decoder=_num_ended(service) - seen,
        refused_s=tuple(answer.answered_s - answer.sent_s for answer in answers if answer.outcome == "refused"),
        answer_s=statistics.median(one.answered_s - one.sent_s for one in in_time) if in_time else None,
    )


def _num_ended(service: TextService) -> int:
    """Returns the number of calls that the decoder has ended with any status; there is no other client."""
    return int(service.metric(service.decoders, "lookonce_grpc_requests_total"))


def condensed(figures: Figures) -> dict[str, object]:
    """Returns the figures for JSON, with quantiles in place of all refusal times."""
    record = asdict(figures)
    for phase in (record["full_batch"], record["closed"], *itertools.chain.from_iterable(record["open_loop"].values())):
        refused_s = phase.pop("refused_s")
        phase["refused_s"] = {share: quantile(refused_s, share) for share in (0.5, 0.9, 0.99, 1.0)} if refused_s else {}
    return record


def section(model: str, by_engine: Mapping[str, Figures]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    load = next(iter(by_engine.values())).load
    question = (
        "## overload\n\nWhat happens when more is asked than can be answered? Goals: everybody hears how it ended, "
        f"answers in time at {load.shares[-1]:g} of\nthe speed at saturation at least 0.9 of the best, refusals within "
        "50 ms."
    )
    note = (
        f"Model `{model}`, {load.num_tokens} tokens an answer, prompts seen before, half of the calls streams. The "
        f"deadline is {load.patience:g} × the time of an\nanswer while {load.num_running} run. {load.num_rounds} "
        f"rounds of {load.duration_s:g} s and a deadline, of which the first deadline does not count. Saturation:\n"
        f"{load.num_concurrent} at a time."
    )
    tables = [table for engine, figures in by_engine.items() for table in _tables(engine, figures)]
    return "\n\n".join([question, *tables, note])


def _tables(engine: str, figures: Figures) -> list[str]:
    """Returns the results and the loads with one place of the engine."""
    load, ratios, refused_s = figures.load, figures.goodput_ratios, figures.refused_s
    phases = [figures.full_batch, figures.closed, *itertools.chain.from_iterable(figures.open_loop.values())]
    head = ["load", "answers in time per second", "least … most", "time of an answer", "ok, refused, late, else"]
    rows = [
        _row(f"{load.num_running} at a time, no deadline", [figures.full_batch]),
        _row(f"{load.num_concurrent} at a time, no deadline", [figures.closed]),
        *(_row(f"arrivals at {share:g} of that speed", rounds) for share, rounds in figures.open_loop.items()),
    ]
    results = [
        [
            "answers in time under the highest load ÷ under the best",
            f"{statistics.median(ratios):.2f}",
            _spread(ratios),
        ],
        [
            "time to a refusal, median and P99",
            *(
                f"{1000 * quantile(refused_s, share):.1f} ms" if refused_s else "nobody refused"
                for share in (0.5, 0.99)
            ),
        ],
        [
            "answered ÷ sent, and ended by the decoder ÷ sent",
            _fraction(sum(phase.num_answered for phase in phases), sum(phase.num_sent for phase in phases)),
            _fraction(sum(phase.num_seen_by_decoder for phase in phases), sum(phase.num_sent for phase in phases)),
        ],
    ]
    place = f"The engine in a {engine}; deadline {figures.deadline_s:.2f} s:"
    return [place, report.table(["", "", ""], results), report.table(head, rows)]


def _row(name: str, phases: Sequence[Phase]) -> list[str]:
    goodput = [phase.goodput for phase in phases]
    answer_s = [phase.answer_s for phase in phases if phase.answer_s is not None]
    outcomes = [sum(phase.outcomes.get(outcome, 0) for phase in phases) for outcome in ("ok", "refused", "late")]
    others = sum(phase.num_answered for phase in phases) - sum(outcomes)
    return [
        name,
        f"{statistics.median(goodput):.1f}",
        _spread(goodput),
        f"{statistics.median(answer_s):.2f} s" if answer_s else "",
        ", ".join(str(number) for number in (*outcomes, others)),
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}"


def _fraction(part: int, whole: int) -> str:
    return f"{part} ÷ {whole}"


if __name__ == "__main__":
    main()
