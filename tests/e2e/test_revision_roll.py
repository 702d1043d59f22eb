"""A fleet goes from one model revision to the next under load: no call fails, no answer mixes two revisions.

Both revisions are behind the same targets meanwhile, and share one Redis.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from lookonce.aio import AsyncClient
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.local.reserved_port import reserved_port
from tests import image_files, tiny_models
from tests.conftest import ONE_THREAD
from tests.in_process_stack import RunningService, start_decoder, start_encoder, until_ready

MAX_TOKENS = 6
NUM_PICTURES = 40
NUM_CALLERS = 4
# Between two calls of a caller, so that the load leaves time to the services that start.
PAUSE_S = 0.2
# More than clients need to hear of NOT_SERVING.
DRAIN = ("--drain-delay-s", "1", "--drain-timeout-s", "30")
SMALL = ("--num-kv-blocks", "200", "--max-context-tokens", "1000")
TIMEOUT_S = 120.0

Start = Callable[[Sequence[str], AsyncExitStack], Awaitable[RunningService]]


@dataclass(frozen=True, slots=True)
class Revision:
    """A model folder, and the answer that it gives to each picture."""

    folder: pathlib.Path
    answers: list[tuple[int, ...]]


@dataclass(slots=True)
class Replica:
    """A service at a fixed address."""

    start: Start
    flags: tuple[str, ...]
    exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def run(self, folder: pathlib.Path) -> RunningService:
        """Starts the service with a model folder."""
        return await self.start(["--model", str(folder), *self.flags], self.exits)

    async def replace(self, folder: pathlib.Path) -> None:
        """Drains the service and starts it with another folder."""
        await self.exits.aclose()
        await self.run(folder)


@functools.cache
def pictures() -> list[bytes]:
    return [image_files.encoded(image_files.noise(7000 + number, 70, 60)) for number in range(NUM_PICTURES)]


async def answer(client: AsyncClient, picture: bytes) -> tuple[int, ...]:
    generation = await client.generate(
        "what is it", [picture], max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS, temperature=0.0
    )
    return tuple(generation.token_ids)


async def revision(folder: pathlib.Path) -> Revision:
    """The answers of an encoder and a decoder that have this folder for themselves."""
    async with AsyncExitStack() as exits:
        shared = ["--model", str(folder), "--listen", "127.0.0.1:0", *ONE_THREAD]
        encoder = await start_encoder(shared, exits)
        decoder = await start_decoder([*shared, *SMALL, "--encoder-target", encoder.target], exits)
        await until_ready(encoder, decoder)
        client = await exits.enter_async_context(AsyncClient.connect(decoder.target, max_retries=0))
        return Revision(folder, [await answer(client, picture) for picture in pictures()])


@asynccontextmanager
async def fleet(folder: pathlib.Path, redis_url: str) -> AsyncIterator[tuple[list[Replica], list[Replica], str]]:
    """Two encoders and two decoders, and the decoders' target."""
    async with AsyncExitStack() as exits:
        addresses = [f"127.0.0.1:{exits.enter_context(reserved_port())}" for _ in range(4)]
        to_encoders = ("--encoder-target", f"ipv4:{','.join(addresses[:2])}")
        shared = (*ONE_THREAD, *DRAIN, "--redis-url", redis_url, "--redis-budget-s", "5", "--listen")
        encoders = [Replica(start_encoder, (*shared, address)) for address in addresses[:2]]
        decoders = [Replica(start_decoder, (*shared, address, *SMALL, *to_encoders)) for address in addresses[2:]]
        for replica in (*encoders, *decoders):
            exits.push_async_callback(replica.exits.aclose)
            await until_ready(await replica.run(folder))
        yield encoders, decoders, f"ipv4:{','.join(addresses[2:])}"


async def until_each(client: AsyncClient, expected: Revision) -> None:
    """Waits until the answers about all pictures are those of one revision. They come from all decoders."""
    async with asyncio.timeout(TIMEOUT_S):
        while [await answer(client, one) for one in pictures()] != list(expected.answers):
            pass


@pytest.fixture(scope="module")
def revisions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Revision, Revision]:
    """The old and the new one."""
    folder = tmp_path_factory.mktemp("revisions")
    folders = [tiny_models.build_llava_clip(folder / name, seed=seed) for seed, name in enumerate(("old", "new"))]
    old, new = (asyncio.run(revision(one)) for one in folders)
    return old, new


@pytest.mark.parametrize("order", ["encoder first", "decoder first"])
async def test_no_call_fails_and_every_answer_is_of_one_revision(
    order: str, revisions: tuple[Revision, Revision], own_redis: EmbeddedRedis
) -> None:
    old, new = revisions
    assert sum(one == other for one, other in zip(old.answers, new.answers, strict=True)) < NUM_PICTURES // 2
    data, failures, wrong, num_right = pictures(), [], [], [0, 0]
    is_over = False
    async with (
        fleet(old.folder, own_redis.url) as (encoders, decoders, target),
        AsyncClient.connect(target, max_retries=0) as client,
    ):

        async def ask_forever(first: int) -> None:
            for number in itertools.cycle(range(NUM_PICTURES)):
                if is_over:
                    return
                index = (first + number) % NUM_PICTURES
                try:
                    found = await answer(client, data[index])
                except Exception as error:
                    failures.append(repr(error))
                    continue
                right = found == old.answers[index], found == new.answers[index]
                if not any(right):
                    wrong.append((index, found))
                num_right[0] += right[0]
                num_right[1] += right[1]
                await asyncio.sleep(PAUSE_S)

        async with asyncio.TaskGroup() as callers:
            for caller in range(NUM_CALLERS):
                callers.create_task(ask_forever(caller * NUM_PICTURES // NUM_CALLERS))
            await asyncio.sleep(1)
            # A new decoder that comes first is not ready until its encoder comes.
            steps = [encoders[0], decoders[0]] if order == "encoder first" else [decoders[0], encoders[0]]
            if order == "decoder first":
                steps += [decoders[1], encoders[1]]
            for replica in steps:
                await replica.replace(new.folder)
                # Clients connect again within five seconds.
                await asyncio.sleep(6)
            if order == "decoder first":
                await until_each(client, new)
            async with asyncio.timeout(TIMEOUT_S):
                while min(num_right) <= NUM_PICTURES and not failures:
                    await asyncio.sleep(PAUSE_S)
            is_over = True
    assert not failures, f"{len(failures)} failed, such as {failures[:3]}"
    assert not wrong
