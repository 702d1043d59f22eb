"""The two loads of a soak: a control client at a fixed rate, and a working load that asks, cancels and gives up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass

from benchmarks.soak_asks import MAX_TOKENS, Ask
from lookonce.aio import AsyncClient
from lookonce.errors import LookonceError
from lookonce.status_codes import status_row

TIMEOUT_S = 30.0
# A call without a terminal answer so long after its deadline hangs.
GRACE_S = 5.0
RIGHT, WRONG, CANCELLED, HUNG = "right", "wrong", "cancelled", "hung"
_CANCELLED_SHARE = 0.15
_HURRIED_SHARE = 0.1
# Longest delay of a cancellation, and longest of the short deadlines.
_SHORT_S = 0.5
_LONGEST_PAUSE_S = 0.4


@dataclass(frozen=True, slots=True)
class Call:
    """One call that has ended; times are seconds of the monotonic clock."""

    # "control" or "working".
    client: str
    sent_s: float
    ended_s: float
    # One of the four above, or status and reason of the error.
    outcome: str


class Recorder:
    """Makes calls and records how they ended."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        # Descriptions of wrong, hung and untyped ones, to be reproduced.
        self.notes: list[str] = []
        # PNGs of asks that were sent.
        self.pictures: dict[str, set[bytes]] = {"control": set(), "working": set()}

    async def call(
        self,
        name: str,
        client: AsyncClient,
        ask: Ask,
        *,
        is_stream: bool = False,
        timeout_s: float = TIMEOUT_S,
        cancel_after_s: float | None = None,
    ) -> None:
        """Sends one ask; it ends with an answer, with an error, by the cancellation, or not at all."""
        self.pictures[name].update(ask.pictures)
        sent_s = time.monotonic()
        task = asyncio.create_task(_answer(client, ask, timeout_s, is_stream=is_stream))
        if cancel_after_s is not None:
            await asyncio.wait({task}, timeout=cancel_after_s)
            task.cancel()
        await asyncio.wait({task}, timeout=timeout_s + GRACE_S)
        outcome, note = _outcome(task, ask)
        if timeout_s < TIMEOUT_S and outcome.startswith("DEADLINE"):
            outcome = "a short deadline passed"
        if note:
            kind = "stream" if is_stream else "unary"
            text = f"{name}, {kind}, deadline {timeout_s:.2f} s, cancelled after {cancel_after_s} s: {outcome}: {note}"
            self.notes.append(text)
            print(text, flush=True)
        self.calls.append(Call(name, sent_s, time.monotonic(), outcome))
        task.cancel()


async def _answer(client: AsyncClient, ask: Ask, timeout_s: float, *, is_stream: bool) -> str:
    if not is_stream:
        answer = await client.generate(
            ask.question, ask.pictures, max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=timeout_s
        )
        return answer.text
    async with client.stream(
        ask.question, ask.pictures, max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=timeout_s
    ) as stream:
        return "".join([piece async for piece in stream])


def _outcome(task: asyncio.Task[str], ask: Ask) -> tuple[str, str]:
    """Returns how the call ended, and what is to be said about it."""
    about = f"{ask.question!r} about {len(ask.pictures)} pictures"
    if not task.done():
        return HUNG, f"{about}, {task.get_stack()}"
    if task.cancelled():
        return CANCELLED, ""
    error = task.exception()
    if error is None:
        text = task.result().strip()
        return (RIGHT, "") if text == ask.answer else (WRONG, f"{about}: {text!r}, expected {ask.answer!r}")
    if not isinstance(error, LookonceError):
        return f"untyped {type(error).__name__}", f"{about}: {error!r}"
    row = status_row(error)
    return f"{row.code.name} {row.reason}", error.message if row.reason == "INTERNAL" else ""


@contextlib.asynccontextmanager
async def control_load(
    recorder: Recorder, client: AsyncClient, asks: Sequence[Ask], interval_s: float
) -> AsyncIterator[None]:
    """Asks in turns, one every `interval_s`, however long answers take; every third call is a stream."""

    ended = asyncio.Event()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            began_s = time.monotonic()
            for number, ask in enumerate(itertools.cycle(asks)):
                await asyncio.sleep(began_s + number * interval_s - time.monotonic())
                if ended.is_set():
                    return
                group.create_task(recorder.call("control", client, ask, is_stream=number % 3 == 2))

    async with _beside(run, ended):
        yield


@contextlib.asynccontextmanager
async def working_load(
    recorder: Recorder, client: AsyncClient, asks: Sequence[Ask], rng: random.Random, duration_s: float, num_loops: int
) -> AsyncIterator[None]:
    """Loops of asks at random. They become known one by one over the duration, so that there are always new ones."""
    ended, began_s = asyncio.Event(), time.monotonic()

    async def run() -> None:
        while not ended.is_set():
            num_known = 1 + int((len(asks) - 1) * min(1.0, (time.monotonic() - began_s) / duration_s))
            # Half of them are among the newest.
            ask = rng.choice(asks[max(0, num_known - 10) : num_known] if rng.random() < 0.5 else asks[:num_known])
            fate = rng.random()
            cancel_after_s = rng.uniform(0, _SHORT_S) if fate < _CANCELLED_SHARE else None
            is_hurried = _CANCELLED_SHARE <= fate < _CANCELLED_SHARE + _HURRIED_SHARE
            timeout_s = rng.uniform(0.005, _SHORT_S) if is_hurried else TIMEOUT_S
            await recorder.call(
                "working", client, ask,
                is_stream=rng.random() < 0.5, timeout_s=timeout_s, cancel_after_s=cancel_after_s,
            )  # fmt: skip
            await asyncio.sleep(rng.uniform(0, _LONGEST_PAUSE_S))

    async with _beside(run, ended, num_loops):
        yield


@contextlib.asynccontextmanager
async def _beside(
    run: Callable[[], Coroutine[object, object, None]], ended: asyncio.Event, num_loops: int = 1
) -> AsyncIterator[None]:
    """Runs loops beside the block; when it ends, their calls come to an end."""
    loops = [asyncio.create_task(run()) for _ in range(num_loops)]
    try:
        yield
    finally:
        ended.set()
        await asyncio.gather(*loops)
