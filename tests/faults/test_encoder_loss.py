"""Loss of encoders: cached rows still serve, another replica takes over, and other calls fail in time."""

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
from tests.warm_processes import WarmProcesses

LEASE_S = 2.0
# Allowance beyond a deadline or the end of a lease on a busy machine. On an idle one a takeover is done within
# LEASE_S + 1 s of the holder's end. The tests print the time it took.
MARGIN_S = 20.0
# On a busy machine, a read of Redis takes longer than the default budget; then cached pictures would need an encoder.
REDIS_BUDGET = ("--redis-budget-s", str(LEASE_S))
ENCODER = (*ONE_THREAD, *REDIS_BUDGET, "--encode-lease-s", str(LEASE_S))
# A frozen encoder is detected after 5 s. The decoder has room for two pictures, so that others are fetched again.
DECODER = (
    *ONE_THREAD,
    *REDIS_BUDGET,
    "--encoder-cache-rows",
    "60",
    "--keepalive-time-s",
    "2",
    "--keepalive-timeout-s",
    "3",
)


@pytest.fixture(scope="module")
def running(fingerprint: Fingerprint, warm_processes: WarmProcesses) -> Iterator[LocalStack]:
    with (
        warm_processes.for_stacks(),
        LocalStack(fingerprint.folder, num_encoders=2, encoder_arguments=ENCODER, decoder_arguments=DECODER) as stack,
    ):
        yield stack


@pytest.fixture
async def stack(running: LocalStack, fingerprint: Fingerprint, tmp_path: pathlib.Path) -> LocalStack:
    """A stack with two encoders in use; one that an earlier test killed is restarted at its address."""
    dead = [index for index, process in enumerate(running.encoders) if process.returncode is not None]
    for index in dead:
        running.encoders[index] = restarted(running, index, fingerprint.folder, tmp_path)
    if dead:
        async with AsyncClient.connect(running.decoder_targets[0], max_retries=0) as client:
            await until_used(client, fingerprint, running, running.encoders)
    return running


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient.connect(stack.decoder_targets[0], max_retries=0) as client:
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
    """Waits until the decoder sends calls to these encoders and no others."""
    async with asyncio.timeout(100):
        while True:
            before = [num_queries(stack, process) for process in processes]
            asking = (describe(client, picture) for picture in fingerprint.fresh(8))
            answers = await asyncio.gather(*asking, return_exceptions=True)
            was_used = [num_queries(stack, process) > num for process, num in zip(processes, before, strict=True)]
            if all(was_used) and not any(isinstance(answer, BaseException) for answer in answers):
                return


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
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
    """Returns the longest remaining time of a lease, seconds; 0 when there is none."""
    assert stack.redis_url is not None
    with redis.Redis.from_url(stack.redis_url) as connection:
        # PTTL is negative for a lease that has ended since the scan.
        left_ms = [int(connection.pttl(name)) for name in connection.scan_iter("lookonce:*:l")]
        return max([0, *left_ms]) / 1000


async def until_taken_over(stack: LocalStack, process: ChildProcess, num_before: int) -> None:
    """Waits until `process` encodes an image that another one had begun, and prints how long that took.

    Fails when it takes longer than the rest of the lease and `MARGIN_S`. If Redis answers slowly, `process` encodes
    without a lease, which does not count as a takeover.
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
    """Returns the number of images looked up in both caches."""
    return int(stack.metric([process], "lookonce_encoder_cache_queries_total"))


def has_asked_both_caches(stack: LocalStack, process: ChildProcess, num_before: int) -> bool:
    return num_queries(stack, process) >= num_before + 2


def check(answers: list[Generation], pictures: list[Picture]) -> None:
    assert [answer.token_ids for answer in answers] == [picture.token_ids for picture in pictures]


async def ended_in_time(call: Awaitable[Generation], picture: Picture, deadline_s: float) -> bool:
    """Returns whether the call was answered; checks the answer, or the error and its time."""
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
        # Half of them end at their deadline, half when the encoders are found to be silent.
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
        AsyncClient.connect(stack.decoder_targets[0], holder.ready.target, max_retries=0) as to_holder,
        AsyncClient.connect(stack.decoder_targets[0], other.ready.target, max_retries=0) as to_other,
    ):
        freezing = asyncio.create_task(to_holder.encode([image], timeout_s=100))
        await until(lambda: is_encoding(stack, holder))
        with frozen(holder):
            waiting = asyncio.create_task(to_other.encode([image], timeout_s=100))
            await until_taken_over(stack, other, num_before)
            await waiting
        # On a busy machine the freeze may exceed the ping's timeout, which ends this call.
        with contextlib.suppress(UnavailableError):
            await freezing
    check([await describe(client, picture)], [picture])


async def test_another_encoder_takes_over_from_one_that_was_killed_in_the_middle_of_an_encode(
    stack: LocalStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    holder, other = stack.encoders
    num_takeovers_before = num_takeovers(stack, other)
    async with (
        AsyncClient.connect(stack.decoder_targets[0], holder.ready.target, max_retries=0) as to_holder,
        AsyncClient.connect(stack.decoder_targets[0], other.ready.target, max_retries=0) as to_other,
    ):
        for _ in range(5):
            picture = fingerprint.slow()
            image = ImageRef.from_bytes(picture.data)
            dying = asyncio.create_task(to_holder.encode([image], timeout_s=100))
            await until(lambda: is_encoding(stack, holder))
            num_before = num_queries(stack, other)
            waiting = asyncio.create_task(to_other.encode([image], timeout_s=100))
            # Neither its own cache nor Redis has a row of the picture.
            await until(functools.partial(has_asked_both_caches, stack, other, num_before))
            with frozen(holder):
                # On a busy machine the encode or the lease may have ended first. Then another picture is tried.
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
    # The child processes of the killed encoders end by themselves, even during their work.
    assert started
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, 10)
    assert not alive
