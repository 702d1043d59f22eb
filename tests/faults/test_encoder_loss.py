"""Losing encoders: what is cached still answers, another replica takes over, the rest is told so in time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pathlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import psutil
import pytest
import redis

from lookonce.aio import AsyncClient
from lookonce.errors import DeadlineError, UnavailableError
from lookonce.generation import Generation
from lookonce.images import ImageRef
from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import LocalStack
from tests.conftest import ONE_THREAD
from tests.faults.conftest import Fingerprint, Picture, describe, tell_story

pytestmark = pytest.mark.services

LEASE_S = 1.0
# Beyond a deadline or the end of a lease, on a machine that is busy. On one that is not, a takeover ends within
# LEASE_S + 1 s of the holder's end; the tests print how long it took.
MARGIN_S = 5.0
ENCODER = (*ONE_THREAD, "--encode-lease-s", str(LEASE_S))
# A frozen encoder is noticed after 3 s. Two pictures fit on the decoder: what is asked again is fetched again.
DECODER = (*ONE_THREAD, "--encoder-cache-rows", "60", "--keepalive-time-s", "2", "--keepalive-timeout-s", "1")


@pytest.fixture(scope="module")
def running(fingerprint: Fingerprint) -> Iterator[LocalStack]:
    with LocalStack(fingerprint.folder, num_encoders=2, encoder_arguments=ENCODER, decoder_arguments=DECODER) as stack:
        yield stack


@pytest.fixture
async def stack(running: LocalStack, fingerprint: Fingerprint, tmp_path: pathlib.Path) -> LocalStack:
    """Two encoders in use: one that an earlier test killed comes back at its old address."""
    dead = [index for index, process in enumerate(running.encoders) if process.returncode is not None]
    for index in dead:
        running.encoders[index] = restarted(running, index, fingerprint.folder, tmp_path)
    if dead:
        async with AsyncClient.connect(running.decoder_targets[0]) as client:
            await until_used(client, fingerprint, running, running.encoders)
    return running


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        yield client


def restarted(stack: LocalStack, index: int, folder: pathlib.Path, directory: pathlib.Path) -> ChildProcess:
    assert stack.redis_url is not None
    arguments = ["--model", str(folder), "--redis-url", stack.redis_url, "--metrics-listen", "127.0.0.1:0"]
    arguments += ["--listen", stack.encoder_targets[index], *ENCODER]
    process = ChildProcess(f"encoder-{index}", "encoder_svc", arguments, directory)
    process.wait_until_ready(time.monotonic() + 60)
    return process


async def until_used(
    client: AsyncClient, fingerprint: Fingerprint, stack: LocalStack, processes: Sequence[ChildProcess]
) -> None:
    """Until the decoder's calls go round these encoders and no others."""
    async with asyncio.timeout(30):
        while True:
            before = [num_queries(stack, process) for process in processes]
            asking = (describe(client, picture) for picture in fingerprint.fresh(8))
            answers = await asyncio.gather(*asking, return_exceptions=True)
            was_used = [num_queries(stack, process) > num for process, num in zip(processes, before, strict=True)]
            if all(was_used) and not any(isinstance(answer, BaseException) for answer in answers):
                return


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.005)


def kill(process: ChildProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def frozen(*processes: ChildProcess) -> Iterator[None]:
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


def is_encoding(stack: LocalStack, process: ChildProcess) -> bool:
    return stack.metric([process], "lookonce_encoder_queued_images") > 0


def num_takeovers(stack: LocalStack, process: ChildProcess) -> int:
    return int(stack.metric([process], "lookonce_encoder_lease_takeovers_total"))


def lease_left_s(stack: LocalStack) -> float:
    """Returns the longest time to live of all leases, seconds; 0 when there is none."""
    assert stack.redis_url is not None
    with redis.Redis.from_url(stack.redis_url) as connection:
        # A lease that has ended meanwhile has a negative time to live.
        left_ms = [int(connection.pttl(name)) for name in connection.scan_iter("lookonce:*:l")]
        return max([0, *left_ms]) / 1000


async def until_taken_over(stack: LocalStack, process: ChildProcess, num_before: int) -> None:
    """Waits until `process` encodes what another one began and left, and prints how long that took.

    It must not take longer than the lease lasts by now, apart from `MARGIN_S`. Where Redis is slow to answer, `process`
    encodes without a lease, which is not counted as a takeover.
    """
    left_s = await asyncio.to_thread(lease_left_s, stack)
    assert left_s <= LEASE_S
    started_s = time.monotonic()
    await until(lambda: num_takeovers(stack, process) == num_before + 1 or is_encoding(stack, process))
    takeover_s = time.monotonic() - started_s
    print(f"taken over after {takeover_s:.2f} s, of a lease that lasted {left_s:.2f} s")
    assert takeover_s < left_s + MARGIN_S


def num_entries(stack: LocalStack) -> int:
    assert stack.redis_url is not None
    with redis.Redis.from_url(stack.redis_url) as connection:
        return len(list(connection.scan_iter("lookonce:*:e")))


def num_queries(stack: LocalStack, process: ChildProcess) -> int:
    """For how many images both caches were asked, together."""
    return int(stack.metric([process], "lookonce_encoder_cache_queries_total"))


def has_asked_both_caches(stack: LocalStack, process: ChildProcess, num_before: int) -> bool:
    return num_queries(stack, process) >= num_before + 2


def check(answers: list[Generation], pictures: list[Picture]) -> None:
    assert [answer.token_ids for answer in answers] == [picture.token_ids for picture in pictures]


async def ended_in_time(call: Awaitable[Generation], picture: Picture, deadline_s: float) -> bool:
    """Whether the call was answered, rightly; otherwise it must have ended by its deadline, with one of two errors."""
    started_s = time.monotonic()
    try:
        answer = await call
    except (UnavailableError, DeadlineError):
        assert time.monotonic() - started_s < deadline_s + MARGIN_S
        return False
    assert answer.token_ids == picture.token_ids
    return True


async def test_calls_to_a_frozen_encoder_end_in_time_and_then_go_to_the_other_one(
    stack: LocalStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    pictures = fingerprint.fresh(8)
    with frozen(stack.encoders[0]):
        in_time = [ended_in_time(describe(client, one, timeout_s=10), one, 10) for one in pictures]
        assert any(await asyncio.gather(*in_time))
        await until_used(client, fingerprint, stack, stack.encoders[1:])
        check(await asyncio.gather(*(describe(client, picture) for picture in pictures)), pictures)


async def test_while_all_encoders_are_frozen_nothing_hangs_beyond_its_deadline(
    stack: LocalStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    cached, unseen = fingerprint.fresh(4), fingerprint.fresh(4)
    check([await describe(client, picture) for picture in cached], cached)
    with frozen(*stack.encoders):
        story = asyncio.create_task(tell_story(client))
        # Half of them end by their deadline, half when the encoders are found to be silent.
        deadlines_s = [0.5, 0.5, 10.0, 10.0]
        late = [
            ended_in_time(describe(client, one, timeout_s=deadline_s), one, deadline_s)
            for one, deadline_s in zip(unseen, deadlines_s, strict=True)
        ]
        assert await asyncio.gather(*late) == [False] * len(unseen)
        check(await asyncio.gather(*(describe(client, picture) for picture in cached)), cached)
        assert await story == fingerprint.story
    await until_used(client, fingerprint, stack, stack.encoders)
    check(await asyncio.gather(*(describe(client, picture) for picture in unseen)), unseen)


async def test_an_encoder_that_freezes_with_the_lease_is_taken_over_and_spoils_nothing_afterwards(
    stack: LocalStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    holder, other = stack.encoders
    picture = fingerprint.slow()
    image = ImageRef.from_bytes(picture.data)
    num_before = num_takeovers(stack, other)
    async with (
        AsyncClient.connect(stack.decoder_targets[0], holder.ready.target) as to_holder,
        AsyncClient.connect(stack.decoder_targets[0], other.ready.target) as to_other,
    ):
        freezing = asyncio.create_task(to_holder.encode([image], timeout_s=30))
        await until(lambda: is_encoding(stack, holder))
        with frozen(holder):
            waiting = asyncio.create_task(to_other.encode([image], timeout_s=30))
            await until_taken_over(stack, other, num_before)
            await waiting
        # A freeze that a busy machine draws out beyond the ping's timeout ends this call.
        with contextlib.suppress(UnavailableError):
            await freezing
    check([await describe(client, picture)], [picture])


async def test_another_encoder_takes_over_from_one_that_was_killed_in_the_middle_of_an_encode(
    stack: LocalStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    holder, other = stack.encoders
    num_takeovers_before = num_takeovers(stack, other)
    async with (
        AsyncClient.connect(stack.decoder_targets[0], holder.ready.target) as to_holder,
        AsyncClient.connect(stack.decoder_targets[0], other.ready.target) as to_other,
    ):
        for _ in range(5):
            picture = fingerprint.slow()
            image = ImageRef.from_bytes(picture.data)
            dying = asyncio.create_task(to_holder.encode([image], timeout_s=30))
            await until(lambda: is_encoding(stack, holder))
            num_before = num_queries(stack, other)
            waiting = asyncio.create_task(to_other.encode([image], timeout_s=30))
            # Its own cache and Redis have no row of it.
            await until(functools.partial(has_asked_both_caches, stack, other, num_before))
            with frozen(holder):
                # A busy machine may have let the encode or the lease end first; then another picture is tried.
                is_under_lease = await asyncio.to_thread(lease_left_s, stack) > 0 and not is_encoding(stack, other)
                if is_under_lease:
                    kill(holder)
                    break
            await asyncio.gather(dying, waiting)
        await until_taken_over(stack, other, num_takeovers_before)
        with pytest.raises(UnavailableError):
            await dying
        await waiting
    check([await describe(client, picture)], [picture])


async def test_without_encoders_cached_pictures_and_text_are_answered_and_the_rest_is_refused(
    stack: LocalStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    cached, unseen, slow = fingerprint.fresh(6), fingerprint.fresh(6), fingerprint.slow()
    check([await describe(client, picture) for picture in cached], cached)
    refused = [asyncio.create_task(ended_in_time(describe(client, slow, timeout_s=10), slow, 10))]
    await until(lambda: any(is_encoding(stack, process) for process in stack.encoders))
    started = [child for process in stack.encoders for child in psutil.Process(process.pid).children()]
    for process in stack.encoders:
        kill(process)
    story = asyncio.create_task(tell_story(client))
    refused += [asyncio.create_task(ended_in_time(describe(client, one, timeout_s=10), one, 10)) for one in unseen]
    check(await asyncio.gather(*(describe(client, picture) for picture in cached)), cached)
    assert not any(await asyncio.gather(*refused))
    assert await story == fingerprint.story
    with pytest.raises(UnavailableError):
        await client.encode([unseen[0].data], timeout_s=10)
    # The decoding processes of killed encoders end by themselves, also in the middle of their work.
    assert started
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, 10)
    assert not alive
