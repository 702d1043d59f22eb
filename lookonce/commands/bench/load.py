"""Sends the requests of a workload and measures each: a closed loop of callers, or an open loop of arrivals."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lookonce.aio import AsyncClient
from lookonce.commands.bench.drawing import Drawing
from lookonce.commands.bench.workload import Question
from lookonce.errors import LookonceError
from lookonce.generation import GenerateOptions, Usage

# Time before a planned arrival at which its pictures are drawn.
_DRAWING_LEAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One request and its answer. Times are seconds; the start counts from the start of the run."""

    start_s: float
    # From the start to the whole answer. In an open loop, the start is the arrival that was planned.
    latency_s: float
    # From the start to the first text; None if there was none.
    first_text_s: float | None
    # Whether it showed a picture for the first time.
    is_new: bool
    num_pictures: int
    # None if it failed.
    usage: Usage | None
    # Kind and message of the error; empty for an answer.
    error: str = ""


class Load:
    """A run against one client. `done` is called after each request."""

    def __init__(self, client: AsyncClient, prompt: str, options: GenerateOptions, done: Callable[[], None]) -> None:
        self._client = client
        self._prompt = prompt
        self._options = options
        self._done = done
        self._begin_s = 0.0

    async def warm_up(self, questions: Sequence[Question]) -> None:
        """Sends requests one after another and measures nothing. Raises the error of one that fails."""
        for question in questions:
            await self._client.generate(self._prompt, await _files_of(question), **self._options)

    async def closed_loop(self, questions: Sequence[Question], num_callers: int) -> list[Measured]:
        """Sends the requests from so many callers, each of which waits for an answer before its next request."""
        self._begin_s = time.monotonic()
        waiting = iter(questions)
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(self._call(waiting)) for _ in range(num_callers)]
        return [one for caller in callers for one in caller.result()]

    async def open_loop(self, questions: Sequence[Question], times_s: Sequence[float]) -> list[Measured]:
        """Sends each request at its time, however many others are in progress."""
        self._begin_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._arrive(question, at_s))
                for question, at_s in zip(questions, times_s, strict=True)
            ]
        return [task.result() for task in tasks]

    async def _call(self, waiting: Iterator[Question]) -> list[Measured]:
        measured = []
        for question in waiting:
            files = await _files_of(question)
            measured.append(await self._ask(question, files, time.monotonic()))
        return measured

    async def _arrive(self, question: Question, at_s: float) -> Measured:
        start_s = self._begin_s + at_s
        await asyncio.sleep(start_s - _DRAWING_LEAD_S - time.monotonic())
        files = await _files_of(question)
        await asyncio.sleep(start_s - time.monotonic())
        return await self._ask(question, files, start_s)

    async def _ask(self, question: Question, files: Sequence[bytes | pathlib.Path], start_s: float) -> Measured:
        first_s: float | None = None
        usage: Usage | None = None
        error = ""
        try:
            async with self._client.stream(self._prompt, files, **self._options) as stream:
                async for _ in stream:
                    first_s = first_s or time.monotonic()
                usage = stream.usage
        except LookonceError as failure:
            error = f"{type(failure).__name__}: {failure.message}"
        end_s = time.monotonic()
        self._done()
        return Measured(
            start_s - self._begin_s,
            end_s - start_s,
            None if first_s is None else first_s - start_s,
            question.is_new,
            len(question.pictures),
            usage,
            error,
        )


async def _files_of(question: Question) -> list[bytes | pathlib.Path]:
    """Returns the pictures of a request as the client takes them; draws them in a thread."""
    return [
        await asyncio.to_thread(picture.png) if isinstance(picture, Drawing) else picture
        for picture in question.pictures
    ]
