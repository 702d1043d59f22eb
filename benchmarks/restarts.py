"""What do clients of the SDK notice when one of two decoders restarts again and again? `--help` lists the options.

Loops of calls and of streams ask questions whose answers are known. Meanwhile one decoder after the other is ended and
started again at its address: half of the times by SIGTERM, as in a roll-out, and half by SIGKILL, as in a crash. A
stream of which the caller has seen text cannot be repeated, so a crash cuts it. Everything else must be answered, once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field

from benchmarks import report
from lookonce.aio import AsyncClient
from lookonce.errors import LookonceError, UnavailableError
from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import LocalStack

_NAME = "restarts"
_MODEL = pathlib.Path(__file__).parents[1] / "models/demo"
_QUESTIONS = [f"Tell me about shape {number}." for number in range(6)]
_MAX_TOKENS = 24
_TIMEOUT_S = 60.0
_PAUSE_S = 0.02
_LOOK_S = 0.02
_ONE_THREAD = ["--num-threads", "1"]
# Longer than a client needs to hear of NOT_SERVING.
_DRAIN = ["--drain-delay-s", "1"]
_SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a measurement."""

    num_restarts: int
    num_calls: int = 6
    num_streams: int = 4


@dataclass(slots=True)
class Outcome:
    """The ends of all calls beside the restarts by one signal."""

    signal: str
    max_retries: int
    num_restarts: int = 0
    num_right: int = 0
    # Answers that differ from the known one, such as those with a text twice.
    num_wrong: int = 0
    # Streams that a crash cut after the caller had seen text.
    num_cut: int = 0
    longest_s: float = 0.0
    # Messages of the errors of all other calls.
    failures: list[str] = field(default_factory=list)


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--restarts", type=int, default=50, help="by each signal (default: %(default)s)")
    parser.add_argument("--without", type=int, default=10, help="the same without retries (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    plans = [(2, Plan(1, 2, 1) if arguments.quick else Plan(arguments.restarts))]
    if not arguments.quick:
        plans.append((0, Plan(arguments.without)))
    flags = [*_ONE_THREAD, *_DRAIN]
    with LocalStack(_MODEL, num_decoders=2, encoder_arguments=_ONE_THREAD, decoder_arguments=flags) as stack:
        outcomes = asyncio.run(_measure_all(stack, plans))
    figures = {"model": _MODEL.name, "outcomes": [asdict(one) for one in outcomes]}
    report.publish(_NAME, figures, section(outcomes), is_quick=arguments.quick)


async def _measure_all(stack: LocalStack, plans: Sequence[tuple[int, Plan]]) -> list[Outcome]:
    """Measures each plan in turn, in one event loop: its threads start decoders, which would end with their thread."""
    outcomes = []
    for max_retries, plan in plans:
        for name in _SIGNALS:
            outcomes.append(await measure(stack, name, max_retries, plan))
            print(asdict(outcomes[-1]), flush=True)
    return outcomes


async def measure(stack: LocalStack, name: str, max_retries: int, plan: Plan) -> Outcome:
    """Restarts one decoder after the other by this signal, under load."""
    outcome = Outcome(name, max_retries)
    target = f"ipv4:{','.join(stack.decoder_targets)}"
    async with AsyncExitStack() as exits:
        client = await exits.enter_async_context(
            AsyncClient.connect(target, timeout_s=_TIMEOUT_S, max_retries=max_retries)
        )
        known = {question: await _generated(client, question) for question in _QUESTIONS}
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(plan.num_calls + plan.num_streams):
                is_stream = number >= plan.num_calls
                group.create_task(_ask_until(is_over, client, known, number, is_stream, outcome))
            for number in range(plan.num_restarts):
                await asyncio.to_thread(_restart, stack, stack.decoders[number % 2], _SIGNALS[name])
                outcome.num_restarts += 1
            is_over.set()
    return outcome


def _restart(stack: LocalStack, decoder: ChildProcess, number: signal.Signals) -> None:
    """Returns when the new process is ready."""
    os.kill(decoder.pid, number)
    while decoder.returncode is None:
        time.sleep(_LOOK_S)
    new = stack.restart(decoder)
    while not new.is_ready():
        time.sleep(_LOOK_S)


async def _ask_until(
    is_over: asyncio.Event,
    client: AsyncClient,
    known: dict[str, str],
    number: int,
    is_stream: bool,
    outcome: Outcome,
) -> None:
    while not is_over.is_set():
        question = _QUESTIONS[number % len(_QUESTIONS)]
        number += 1
        began_s = time.monotonic()
        seen: list[str] = []
        try:
            text = await (_streamed(client, question, seen) if is_stream else _generated(client, question))
        except UnavailableError as error:
            if seen and outcome.signal == "SIGKILL":
                outcome.num_cut += 1
            else:
                outcome.failures.append(repr(error))
        except LookonceError as error:
            outcome.failures.append(repr(error))
        else:
            outcome.num_right += text == known[question]
            outcome.num_wrong += text != known[question]
        outcome.longest_s = max(outcome.longest_s, time.monotonic() - began_s)
        await asyncio.sleep(_PAUSE_S)


async def _generated(client: AsyncClient, question: str) -> str:
    answer = await client.generate(question, max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return answer.text


async def _streamed(client: AsyncClient, question: str, seen: list[str]) -> str:
    """Returns the pieces of an answer as the caller sees them, which `seen` has from the first one on."""
    async for piece in client.stream(question, max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True):
        seen.append(piece)
    return "".join(seen)


def section(outcomes: Sequence[Outcome]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            one.signal,
            one.max_retries,
            one.num_restarts,
            one.num_right,
            one.num_wrong,
            len(one.failures),
            one.num_cut,
            f"{one.longest_s:.1f} s",
        )
        for one in outcomes
    ]
    head = ("ended by", "retries", "restarts", "right", "wrong", "failed", "cut by a crash after text", "longest call")
    return f"""## {_NAME}

Two decoders of the demo model behind one client of the SDK. One after the other is ended and started again, under
{Plan(0).num_calls} loops of calls and {Plan(0).num_streams} of streams, {_MAX_TOKENS} tokens each. Goal with retries:
no call fails, and no text comes twice. Only a stream whose text was seen cannot be repeated.

{report.table(head, rows)}"""


if __name__ == "__main__":
    main()
