"""What does a tenant notice of another one that sends ten times its share? `--help` lists the options.

One decoder for text, called through the SDK. A tenant keeps its share of the running batch busy, or sends one request
after the other. It is measured alone, beside a second tenant that takes the places which are left, and beside one with
ten times its share of requests, in turn. The first ratio is that of a full batch's steps, the second one that of the
queue.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks import models, report
from benchmarks.frozen_redis import quantile
from benchmarks.text_service import TextService, told_prompts
from lookonce.aio import AsyncClient

_NAME = "tenant_fairness"
_MODELS = {"small-llava": models.small_llava, "demo": models.demo_model}
_TIMEOUT_S = 600.0
_NUM_PROMPTS = 64
# Times its share that the second tenant sends.
_FLOOD = 10
# Requests of each phase that are not counted: the batch fills and empties.
_NUM_SETTLING = 1


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times of the requests of one phase, seconds: until the first text, and until the end."""

    first_s: tuple[float, ...]
    whole_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """A phase alone, two beside the other tenant, and one beside the own tenant's requests, as many as the other's.

    In `shared`, the other tenant takes the places that are left, and no request waits.
    """

    alone: Latencies
    shared: Latencies
    beside: Latencies
    as_one: Latencies

    def ratio(self, name: str, phase: str, base: str = "alone") -> float:
        """Returns the 95th percentile of a time in a phase, by that in another one."""
        there, here = (quantile(getattr(getattr(self, each), name), 0.95) for each in (phase, base))
        return there / here


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of both tenants."""

    num_running: int = 16
    num_rounds: int = 5
    # Requests of the measured tenant in one phase, for each that it has in flight, and at least how many of all.
    num_each: int = 4
    num_least: int = 16
    num_tokens: int = 48


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--model", default="small-llava", choices=list(_MODELS))
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    load = Load(num_rounds=arguments.rounds)
    if arguments.quick:
        arguments.model, load = "demo", Load(num_running=4, num_rounds=1, num_each=3, num_least=3, num_tokens=12)
    figures = asyncio.run(measure(arguments.model, load))
    report.publish(
        _NAME,
        {
            "model": arguments.model,
            "load": asdict(load),
            "rounds": {number: list(map(asdict, rounds)) for number, rounds in figures.items()},
        },
        section(arguments.model, load, figures),
        is_quick=arguments.quick,
    )


async def measure(model: str, load: Load) -> dict[int, list[Round]]:
    """Returns the rounds by the number of requests that the measured tenant has in flight."""
    share = load.num_running // 2
    with TextService(_MODELS[model](), ["--max-num-seqs", str(load.num_running)]) as service:
        async with _client(service, "measured") as client, _client(service, "other") as other:
            rng = random.Random(_NAME)
            prompts = await told_prompts(client, _NUM_PROMPTS, rng)
            await told_prompts(other, 1, rng)
            figures: dict[int, list[Round]] = {}
            for number in (share, 1):
                figures[number] = []
                for index in range(load.num_rounds):
                    phases = [await _phase(client, prompts, number, load)]
                    num_flooding = _FLOOD * share
                    for second, num_other in (
                        (other, load.num_running - number),
                        (other, num_flooding),
                        (client, num_flooding),
                    ):
                        flood = asyncio.create_task(_forever(second, prompts, num_other, load))
                        await asyncio.sleep(0.5)
                        phases.append(await _phase(client, prompts, number, load))
                        flood.cancel()
                        await asyncio.gather(flood, return_exceptions=True)
                    one = Round(*phases)
                    figures[number].append(one)
                    ratios = [f"{one.ratio('whole_s', phase):.2f}" for phase in ("shared", "beside", "as_one")]
                    print(f"{number} in flight, {index}: {ratios}", flush=True)
            return figures


def _client(service: TextService, tenant: str) -> AsyncClient:
    headers = {"x-lookonce-tenant": tenant}
    return AsyncClient.connect(service.target, timeout_s=_TIMEOUT_S, max_retries=0, headers=headers)


async def _phase(client: AsyncClient, prompts: Sequence[str], number: int, load: Load) -> Latencies:
    """Keeps `number` requests in flight, and returns the times of those in the middle."""
    upcoming = itertools.cycle(prompts)

    async def caller() -> list[tuple[float, float]]:
        num_asked = max(load.num_each, load.num_least // number) + 2 * _NUM_SETTLING
        times = [await _ask(client, next(upcoming), load) for _ in range(num_asked)]
        return times[_NUM_SETTLING:-_NUM_SETTLING]

    times = [one for each in await asyncio.gather(*(caller() for _ in range(number))) for one in each]
    return Latencies(tuple(first for first, _ in times), tuple(whole for _, whole in times))


async def _forever(client: AsyncClient, prompts: Sequence[str], number: int, load: Load) -> None:
    upcoming = itertools.cycle(prompts)

    async def caller() -> None:
        while True:
            await _ask(client, next(upcoming), load)

    await asyncio.gather(*(caller() for _ in range(number)))


async def _ask(client: AsyncClient, prompt: str, load: Load) -> tuple[float, float]:
    began_s = time.monotonic()
    first_s = 0.0
    async with client.stream(prompt, max_tokens=load.num_tokens, ignore_eos=True, temperature=0.0) as stream:
        async for _ in stream:
            first_s = first_s or time.monotonic() - began_s
    return first_s, time.monotonic() - began_s


def section(model: str, load: Load, figures: dict[int, list[Round]]) -> str:
    """Returns the section of RESULTS.md."""
    rows = []
    for number, rounds in figures.items():
        for name, title in (("whole_s", "whole answer"), ("first_s", "first text")):
            compared = [
                [one.ratio(name, phase, base) for one in rounds]
                for phase, base in (("shared", "alone"), ("beside", "shared"), ("beside", "alone"), ("as_one", "alone"))
            ]
            alone_s = statistics.median(quantile(getattr(one.alone, name), 0.95) for one in rounds)
            rows.append(
                [
                    number,
                    title,
                    *(f"{statistics.median(each):.2f} ({min(each):.2f} … {max(each):.2f})" for each in compared),
                    f"{alone_s * 1000:.0f} ms",
                ]
            )
    head = ["in flight", "time, P95", "shared ÷ alone", "beside ÷ shared", "beside ÷ alone", "as one ÷ alone", "alone"]
    return (
        f"## {_NAME}\n\nA tenant alone; shared with another one that has requests for the places that are left; "
        f"beside one that has {_FLOOD * load.num_running // 2};\nthen beside as many of its own, which is first come, "
        "first served. "
        f"Model `{model}`, {load.num_running} requests run at a time, {load.num_tokens} tokens out, "
        f"{load.num_rounds} rounds in turn.\n\n" + report.table(head, rows)
    )


if __name__ == "__main__":
    main()
