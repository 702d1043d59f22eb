"""Does anybody get a wrong answer, or none, while a fleet is damaged and abused? `--help` lists the options.

Two encoders, two decoders and Redis as processes, and three tenants. A control client asks at a fixed rate, a working
load asks, cancels and gives up; every answer is compared with that of plain `transformers`. After a calm phase, a fault
or an abuse begins every few seconds, from a seeded order; a second calm phase follows. The first encoder and the first
decoder live through it, and the abuses go to them, so their memory in both calm phases can be compared. The other ones
are killed and replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from benchmarks import report
from benchmarks.soak_abuses import ABUSES
from benchmarks.soak_asks import Ask, AskSource
from benchmarks.soak_faults import Faults
from benchmarks.soak_fleet import ABUSER, CONTROL, MODEL, WORKING, Fleet, running_fleet
from benchmarks.soak_load import Recorder, control_load, working_load
from benchmarks.soak_proxy import CuttingProxy, cutting_proxy
from benchmarks.soak_report import Found, Plan, Window, figures_of, section
from lookonce.aio import AsyncClient

_NAME = "soak"
_CALM_SHARE = 0.1
_LEAST_CALM_S = 60.0


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of faults and requests (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="print the figures and write no results")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    seconds = 60 * arguments.minutes
    plan = Plan(seconds, max(_LEAST_CALM_S, _CALM_SHARE * seconds), arguments.seed)
    if arguments.quick:
        plan = Plan(
            1.5, 0.5, arguments.seed,
            num_each=1, interval_s=0.2, echo_s=0.3, num_loops=2, num_asks=6, abuse_scale=0.02, replaces=False,
        )  # fmt: skip
    if plan.duration_s <= 2 * plan.calm_s:
        parser.error(f"--minutes must exceed {2 * _LEAST_CALM_S / 60:g}: each of the two calm phases takes a minute")
    found = asyncio.run(soak(plan))
    figures = figures_of(plan, found)
    report.publish(_NAME, figures, section(figures), is_quick=arguments.quick or arguments.dry)


async def soak(plan: Plan) -> Found:
    """Runs all phases against a new fleet."""
    rng = random.Random(plan.seed)
    source = AskSource(MODEL, rng)
    control, asks = [source.ask(0), source.ask(1), source.ask(1)], source.asks(plan.num_asks)
    del source
    found = Found()
    # In this thread, since processes end with the thread that starts them.
    with running_fleet(plan.num_each) as fleet:
        async with _abuser(fleet, plan.abuse_scale) as abuse, _proxies(fleet) as (proxies, addresses):
            faults = Faults(fleet, proxies, rng)
            actions = faults.all if plan.replaces else faults.lasting
            storm = _Storm(plan, fleet, found, actions, abuse, rng)
            async with _loads(plan, fleet, found.recorder, (control, asks), addresses):
                await _calm(plan, fleet, found)
                begun_s = time.monotonic()
                await storm.run()
                found.faults_s = (begun_s, time.monotonic())
                await _calm(plan, fleet, found)
            found.num_encodes = await fleet.num_encodes()
        found.ended_by_themselves = fleet.ended_by_themselves
    return found


async def _calm(plan: Plan, fleet: Fleet, found: Found) -> None:
    await asyncio.sleep(plan.calm_s)
    fleet.note_ended()
    found.memory.append(fleet.memory())


@contextlib.asynccontextmanager
async def _loads(
    plan: Plan, fleet: Fleet, recorder: Recorder, asks: tuple[Sequence[Ask], Sequence[Ask]], addresses: Sequence[str]
) -> AsyncIterator[None]:
    """Both loads. The control client connects directly, the working load through proxies."""
    encoders, decoders, cut = (
        f"ipv4:{','.join(targets)}" for targets in (fleet.stack.encoder_targets, fleet.stack.decoder_targets, addresses)
    )
    rng = random.Random(plan.seed)
    async with (
        AsyncClient.connect(decoders, encoders, token=fleet.tokens[CONTROL], max_retries=0) as control,
        AsyncClient.connect(cut, encoders, token=fleet.tokens[WORKING], max_retries=0) as working,
    ):
        for ask in asks[0]:
            await control.generate(ask.question, ask.pictures, max_tokens=1)
        async with (
            working_load(recorder, working, asks[1], rng, plan.duration_s, plan.num_loops),
            control_load(recorder, control, asks[0], plan.control_interval_s),
        ):
            yield


@contextlib.asynccontextmanager
async def _proxies(fleet: Fleet) -> AsyncIterator[tuple[list[CuttingProxy], list[str]]]:
    async with contextlib.AsyncExitStack() as exits:
        pairs = [await exits.enter_async_context(cutting_proxy(target)) for target in fleet.stack.decoder_targets]
        yield [proxy for proxy, _ in pairs], [address for _, address in pairs]


@contextlib.asynccontextmanager
async def _abuser(fleet: Fleet, scale: float) -> AsyncIterator[Callable[[str], Awaitable[dict[str, int]]]]:
    """Yields a function that commits one abuse, in the process that commits them all."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.soak_abuses",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    decoder, encoder = fleet.stack.decoder_targets[0], fleet.stack.encoder_targets[0]
    abuser = {"decoder": decoder, "encoder": encoder, "token": fleet.tokens[ABUSER], "scale": scale}
    stdin.write(f"{json.dumps(abuser)}\n".encode())

    async def commit(name: str) -> dict[str, int]:
        stdin.write(f"{json.dumps(name)}\n".encode())
        ends: dict[str, int] = json.loads(await stdout.readline())
        return ends

    try:
        yield commit
    finally:
        stdin.close()
        await process.wait()


class _Storm:
    """Begins a fault or an abuse at each interval. Two of the same subject never run at once."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        found: Found,
        faults: Mapping[str, Callable[[], Awaitable[None]]],
        abuse: Callable[[str], Awaitable[dict[str, int]]],
        rng: random.Random,
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._found = found
        self._faults = faults
        self._abuse = abuse
        self._rng = rng
        self._busy: set[str] = set()

    async def run(self) -> None:
        """Runs for the plan's time between the calm phases, but until all have come once, and the last one is over.

        Faults and abuses take turns and never overlap, so that a dead replica does not count against the abuses.
        """
        end_s = time.monotonic() + self._plan.duration_s - 2 * self._plan.calm_s
        for number, kind in enumerate(itertools.cycle([self._faults, ABUSES])):
            names = list(kind)
            self._rng.shuffle(names)
            async with asyncio.TaskGroup() as group:
                while names and (number < 2 or time.monotonic() < end_s):
                    self._fleet.note_ended()
                    # Waits for a subject of its own.
                    if (name := next((one for one in names if _subject(one) not in self._busy), None)) is not None:
                        names.remove(name)
                        self._busy.add(_subject(name))
                        group.create_task(self._do(name))
                    await asyncio.sleep(self._plan.interval_s)
            await asyncio.sleep(self._plan.echo_s)
            self._found.stretches.append(self._fleet.memory())
            if number >= 1 and time.monotonic() >= end_s:
                return

    async def _do(self, name: str) -> None:
        begin_s, outcome = time.monotonic(), {"done": 1}
        try:
            if name in ABUSES:
                outcome = await self._abuse(name)
            else:
                await self._faults[name]()
        except Exception as error:
            outcome = {repr(error): 1}
        self._busy.discard(_subject(name))
        end_s = time.monotonic()
        print(f"{name}: {outcome} ({end_s - begin_s:.1f} s)", flush=True)
        self._found.windows.append(Window(name, name in ABUSES, begin_s, end_s + self._plan.echo_s, outcome))


def _subject(name: str) -> str:
    if name in ABUSES:
        return "abuse"
    return next((service for service in ("encoder", "decoder") if service in name), "cache")


if __name__ == "__main__":
    main()
