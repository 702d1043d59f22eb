"""Asks a decoder for the answers to one request: whole, or piece by piece. Several answers run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from lookonce import AsyncClient
from lookonce.generation import Delta, GenerateOptions, Generation, Prompt, TokenLogprobs, Usage

ResultT = TypeVar("ResultT")

_SEEDS = 1 << 64
# Leaves room for the number of the answer in the 128 characters of a request id.
_MAX_ID = 120


@dataclass(frozen=True, slots=True)
class Ask:
    """Prompts, and how often each is to be answered. Answers are numbered through, prompt by prompt."""

    prompts: Sequence[Prompt]
    options: GenerateOptions
    num_each: int = 1

    @property
    def num_answers(self) -> int:
        """The number of answers to all prompts."""
        return len(self.prompts) * self.num_each

    def prompt_of(self, index: int) -> Prompt:
        """Returns the prompt of one answer."""
        return self.prompts[index // self.num_each]

    def options_of(self, index: int, request_id: str, timeout_s: float) -> GenerateOptions:
        """Returns the options of one answer. Each has an id and, if the request has a seed, a seed of its own."""
        options: GenerateOptions = {**self.options, "timeout_s": timeout_s}
        options["request_id"] = request_id if self.num_answers == 1 else f"{request_id[:_MAX_ID]}-{index}"
        seed = self.options.get("seed")
        if seed is not None:
            options["seed"] = (seed + index % self.num_each) % _SEEDS
        return options


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, reasoning and calls of one answer."""

    index: int
    delta: Delta
    # One entry for each token since the piece before, if asked for.
    logprobs: tuple[TokenLogprobs, ...]
    # Token accounting of the answer up to this piece.
    usage: Usage


@dataclass(frozen=True, slots=True)
class End:
    """The end of one answer."""

    index: int
    generation: Generation
    # Those of the tokens after the last piece: they added nothing to the answer.
    logprobs: tuple[TokenLogprobs, ...]

    @property
    def usage(self) -> Usage:
        """Token accounting of the whole answer."""
        return self.generation.usage


Event: TypeAlias = "Piece | End"


async def whole_answers(client: AsyncClient, ask: Ask, request_id: str, timeout_s: float) -> list[Generation]:
    """Returns all answers. If one fails, the others end and its error is raised."""
    return await gathered(
        client.generate(ask.prompt_of(index), **ask.options_of(index, request_id, timeout_s))
        for index in range(ask.num_answers)
    )


async def gathered(calls: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Returns the results of calls that run side by side. If one fails, the others end and its error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


async def answer_events(client: AsyncClient, ask: Ask, request_id: str, timeout_s: float) -> AsyncGenerator[Event]:
    """Yields the pieces and ends of all answers as they come. If one fails, the others end and its error is raised."""
    streams = [_events(client, ask, index, request_id, timeout_s) for index in range(ask.num_answers)]
    async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as events:
        async for event in events:
            yield event


async def _events(
    client: AsyncClient, ask: Ask, index: int, request_id: str, timeout_s: float
) -> AsyncGenerator[Event]:
    num_sent = 0
    async with client.stream(ask.prompt_of(index), **ask.options_of(index, request_id, timeout_s)) as stream:
        async for delta in stream.deltas():
            logprobs = tuple(stream.logprobs[num_sent:])
            num_sent += len(logprobs)
            yield Piece(index, delta, logprobs, stream.usage_so_far)
        yield End(index, stream.generation, tuple(stream.logprobs[num_sent:]))


async def _merged(streams: list[AsyncGenerator[Event]]) -> AsyncGenerator[Event]:
    """Yields the events of all streams in the order of their arrival."""
    # One place: a slow reader slows down the streams.
    queue: asyncio.Queue[Event | Exception] = asyncio.Queue(1)

    async def copy(stream: AsyncGenerator[Event]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put(event)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(copy(stream)) for stream in streams]
    num_running = len(streams)
    try:
        while num_running:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            num_running -= isinstance(event, End)
            yield event
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
