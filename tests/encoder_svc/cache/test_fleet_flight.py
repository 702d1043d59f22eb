"""Replicas agree on who encodes, over a real server; each has its own connections, as separate processes have."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from encoder_svc.cache.done_channel import DoneChannel, Listener
from encoder_svc.cache.encode_lease import EncodeLeases
from encoder_svc.cache.fleet_flight import FleetFlight
from encoder_svc.metrics import EncoderMetrics
from lookonce.common.v1 import common_pb2
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import lease_key
from lookonce.store.embedding_store import EmbeddingStore
from tests import image_files
from tests.encoder_svc.conftest import RunningEncoder, SickModel, StartEncoder
from tests.lookonce.store.entries import write

META = EmbeddingMeta(2, 4, 0, RowDtype.FLOAT32, 10, 10)
TIMEOUT_S = 30.0
# Time for one exchange with Redis. Long, so that a busy machine does not miss it; short where Redis is frozen.
BUDGET_S, FROZEN_BUDGET_S = 5.0, 0.3


def key(name: str) -> ContentKey:
    return content_key(image_digest(name.encode()), EncoderFingerprint("f"), ProcessorOptions(), DEFAULT_TENANT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an encode, and the replica or cache that it came from."""

    where: str
    stored: bool = True


class Replica:
    """The lease's part of an encoder process. Encoding takes as long as `gate` is closed."""

    def __init__(self, name: str, url: str, ttl_s: float, budget_s: float) -> None:
        self.name = name
        self.store = EmbeddingStore(url, budget_s, 60, 1 << 20)
        self.metrics = EncoderMetrics(CollectorRegistry())
        self.done = DoneChannel(url, budget_s)
        self.is_answering = True
        self.flight = FleetFlight(
            EncodeLeases(self.store, ttl_s),
            self.done,
            self.find,
            self.metrics,
            num_threads=2,
            is_answering=lambda: self.is_answering,
        )
        self.num_encodes = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.can_store = True

    async def ask(self, one: ContentKey) -> tuple[Outcome, bool]:
        """Does what the pipeline does after a miss. Returns the outcome, and whether another replica was waited for."""
        async with asyncio.timeout(TIMEOUT_S), self.flight.claimed(one) as claim:
            if claim.found is not None:
                return Outcome("cache"), claim.has_waited
            outcome = await self.encode(one)
            claim.stored = outcome.stored
            return outcome, False

    async def find(self, one: ContentKey) -> EmbeddingMeta | None:
        """Looks up a key in the shared cache."""
        return await asyncio.to_thread(self.store.stat, one)

    async def encode(self, one: ContentKey) -> Outcome:
        """Waits for the gate, then stores rows."""
        self.num_encodes += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        rows = memoryview(bytes(META.size_bytes))
        stored = self.can_store and await asyncio.to_thread(write, self.store, one, META, rows)
        return Outcome(self.name, stored)

    async def close(self) -> None:
        self.gate.set()
        await self.flight.close()
        self.store.close()


@pytest.fixture
async def fleet(own_redis: EmbeddedRedis) -> AsyncIterator[Callable[..., Any]]:
    """Starts replicas, as in `await fleet(4)`, and waits until their channels are connected."""
    async with AsyncExitStack() as stack:

        async def start(size: int, ttl_s: float = 20.0, budget_s: float = BUDGET_S) -> list[Replica]:
            replicas = [Replica(f"replica-{index}", own_redis.url, ttl_s, budget_s) for index in range(size)]
            for replica in replicas:
                stack.push_async_callback(replica.close)
                replica.done.start()
            await until(lambda: all(replica.done.is_connected for replica in replicas))
            return replicas

        yield start


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


def num_encodes(replicas: list[Replica]) -> int:
    return sum(replica.num_encodes for replica in replicas)


async def test_one_of_all_encodes_and_the_others_get_its_rows(
    fleet: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    replicas = await fleet(6)
    for number in range(10):
        one = key(f"image {number}")
        answers = await asyncio.gather(*(replica.ask(one) for replica in replicas))
        # A replica that asks after the end of the encode finds the rows without waiting.
        assert [outcome.where for outcome, _ in answers].count("cache") == 5
        assert all(outcome.stored for outcome, _ in answers)
    assert num_encodes(replicas) == 10
    await until(lambda: all(not replica.flight._releases for replica in replicas))
    with redis.Redis.from_url(own_redis.url) as client:
        assert not list(client.scan_iter("lookonce:*:l")), "a lease is held by nobody's encode"


async def test_the_holder_s_end_is_heard(fleet: Callable[..., Any]) -> None:
    holder, waiter = await fleet(2)
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    async with waiter.done.listening(key("a")) as listener, waiter.done.listening(key("a")) as other:
        assert not await listener.wait(0.3)
        holder.gate.set()
        assert await listener.wait(TIMEOUT_S)
        assert await other.wait(TIMEOUT_S)
    assert listener.outcome == other.outcome == b"stored"
    assert not waiter.done._listeners
    await leading


async def test_the_second_caller_waits_as_long_as_the_encoding_takes(fleet: Callable[..., Any]) -> None:
    holder, waiter = await fleet(2)
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    following = asyncio.create_task(waiter.ask(key("a")))
    await until(lambda: bool(waiter.done._listeners))
    await asyncio.sleep(0.3)
    assert not following.done()
    holder.gate.set()
    assert (await following)[1]
    await leading
    assert waiter.num_encodes == 0


async def test_an_encode_longer_than_the_lease_keeps_it(fleet: Callable[..., Any]) -> None:
    # A third of its life passes between two renewals: a busy machine may be that late without losing it.
    holder, waiter = await fleet(2, ttl_s=3.0)
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    following = asyncio.create_task(waiter.ask(key("a")))
    await asyncio.sleep(3.6)
    holder.gate.set()
    await asyncio.gather(leading, following)
    assert waiter.num_encodes == 0


async def test_a_holder_whose_model_hangs_lets_its_lease_go(fleet: Callable[..., Any]) -> None:
    holder, waiter = await fleet(2, ttl_s=0.3)
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    holder.is_answering = False
    outcome, was_elsewhere = await waiter.ask(key("a"))
    assert (outcome.where, was_elsewhere, leading.done()) == (waiter.name, False, False)
    # It got the lease; it did not give up waiting.
    assert waiter.metrics.lease_takeovers._value.get() == 1
    holder.gate.set()
    await leading


async def test_a_dead_holder_s_lease_is_taken_over(fleet: Callable[..., Any], own_redis: EmbeddedRedis) -> None:
    first, second = await fleet(2, ttl_s=1.0)
    with redis.Redis.from_url(own_redis.url) as client:
        client.set(lease_key(key("a")), b"of a process that was killed", px=1000)
    answers = await asyncio.gather(first.ask(key("a")), second.ask(key("a")))
    assert [outcome.where for outcome, _ in answers].count("cache") == 1
    assert num_encodes([first, second]) == 1
    taken_over = [replica.metrics.lease_takeovers._value.get() for replica in (first, second)]
    assert sum(taken_over) == 1


async def test_when_the_holder_fails_another_tries(fleet: Callable[..., Any]) -> None:
    holder, waiter = await fleet(2)
    holder.gate.clear()
    holder.error = ValueError("its own trouble")
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    following = asyncio.create_task(waiter.ask(key("a")))
    await until(lambda: bool(waiter.done._listeners))
    holder.gate.set()
    with pytest.raises(ValueError, match="its own trouble"):
        await leading
    outcome, was_elsewhere = await following
    assert (outcome.where, was_elsewhere) == (waiter.name, False)


async def test_rows_that_cannot_be_stored_are_encoded_by_everybody_at_once(fleet: Callable[..., Any]) -> None:
    replicas = await fleet(4)
    for replica in replicas:
        replica.can_store = False
    holder, others = replicas[0], replicas[1:]
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    for replica in others:
        replica.gate.clear()
    following = [asyncio.create_task(replica.ask(key("a"))) for replica in others]
    await until(lambda: all(replica.done._listeners for replica in others))
    holder.gate.set()
    # All of them are encoding while none has ended.
    await until(lambda: num_encodes(replicas) == 4)
    for replica in others:
        replica.gate.set()
    answers = await asyncio.gather(leading, *following)
    assert not any(was_elsewhere for _, was_elsewhere in answers)


@pytest.mark.parametrize("trouble", ["gone", "frozen"])
async def test_without_redis_everybody_encodes(
    fleet: Callable[..., Any], own_redis: EmbeddedRedis, trouble: str
) -> None:
    replicas = await fleet(3, budget_s=FROZEN_BUDGET_S)
    if trouble == "gone":
        own_redis.stop()
    else:
        os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        answers = await asyncio.gather(*(replica.ask(key("a")) for replica in replicas))
    finally:
        if trouble == "frozen":
            os.kill(own_redis.pid, signal.SIGCONT)
    assert [outcome.where for outcome, _ in answers] == [replica.name for replica in replicas]


async def test_a_lost_subscription_is_made_again_and_meanwhile_they_look(
    fleet: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    holder, waiter = await fleet(2)
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    following = asyncio.create_task(waiter.ask(key("a")))
    await until(lambda: bool(waiter.done._listeners))
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await until(lambda: not waiter.done.is_connected)
    holder.gate.set()
    assert (await following)[1]
    await leading
    await until(lambda: waiter.done.is_connected)


async def test_a_caller_that_stops_waiting_harms_no_other(fleet: Callable[..., Any]) -> None:
    holder, quitter, waiter = await fleet(3)
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    tasks = [asyncio.create_task(replica.ask(key("a"))) for replica in (quitter, waiter)]
    await until(lambda: all(replica.done._listeners for replica in (quitter, waiter)))
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert not quitter.done._listeners
    holder.gate.set()
    assert (await tasks[1])[1]
    await leading
    assert num_encodes([holder, quitter, waiter]) == 1


async def test_an_encode_that_is_dropped_gives_its_lease_back_at_once(fleet: Callable[..., Any]) -> None:
    holder, waiter = await fleet(2)
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    following = asyncio.create_task(waiter.ask(key("a")))
    await until(lambda: bool(waiter.done._listeners))
    leading.cancel()
    outcome, was_elsewhere = await asyncio.wait_for(following, 10.0)
    assert (outcome.where, was_elsewhere) == (waiter.name, False)


async def test_an_announcement_that_came_too_early_to_be_heard_costs_a_second_and_not_a_lease(
    fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder drops its encode after another replica was refused the lease and before it listens."""
    holder, waiter = await fleet(2, ttl_s=200.0)
    holder.gate.clear()
    leading = asyncio.create_task(holder.ask(key("a")))
    await until(lambda: holder.num_encodes == 1)
    listening = waiter.done.listening

    @asynccontextmanager
    async def late(one: ContentKey) -> AsyncIterator[Listener]:
        leading.cancel()
        await asyncio.gather(leading, *holder.flight._releases.values(), return_exceptions=True)
        await until(lambda: not holder.flight._releases)
        async with listening(one) as listener:
            yield listener

    monkeypatch.setattr(waiter.done, "listening", late)
    outcome, _ = await waiter.ask(key("a"))
    assert outcome.where == waiter.name


async def test_a_caller_who_returns_while_the_lease_is_given_back_gets_it_without_waiting(
    fleet: Callable[..., Any],
) -> None:
    (replica,) = await fleet(1, ttl_s=200.0)
    replica.gate.clear()
    leaving = asyncio.create_task(replica.ask(key("a")))
    await until(lambda: replica.num_encodes == 1)
    for _ in range(20):
        leaving.cancel()
        await asyncio.wait([leaving])
        assert replica.flight._releases
        replica.num_encodes = 0
        leaving = asyncio.create_task(replica.ask(key("a")))
        await until(lambda: replica.num_encodes == 1 or bool(replica.done._listeners))
        assert not replica.done._listeners, "it waits for its own lease"
    leaving.cancel()
    await asyncio.wait([leaving])


def request_of(seed: int) -> pb.EncodeRequest:
    data = image_files.encoded(image_files.noise(seed, 80, 60))
    return pb.EncodeRequest(items=[pb.EncodeItem(image=common_pb2.ImageSource(data=data))])


def encodes(encoders: list[RunningEncoder]) -> int:
    return int(sum(encoder.metric("lookonce_encoder_encodes_total") for encoder in encoders))


async def test_four_replicas_and_fifty_requests_each_for_one_cold_image_encode_once(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis
) -> None:
    async with AsyncExitStack() as stack:
        encoders = [
            await stack.enter_async_context(start_encoder("llava_clip", redis_url=own_redis.url)) for _ in range(4)
        ]
        for seed in range(5):
            request = request_of(9000 + seed)
            answers = await asyncio.gather(*(encoder.stub.Encode(request) for encoder in encoders for _ in range(50)))
            assert encodes(encoders) == seed + 1
            assert all(answer.results[0].stored for answer in answers)


async def test_looks_while_waiting_are_no_queries_and_the_hit_is_one(
    start_encoder: StartEncoder, sick_model: SickModel, own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_svc.cache.fleet_flight._LOOK_S", 0.01)
    looks: list[ContentKey] = []
    stat = EmbeddingStore.stat

    def counted(store: EmbeddingStore, one: ContentKey) -> EmbeddingMeta | None:
        looks.append(one)
        return stat(store, one)

    async with AsyncExitStack() as stack:
        encoders = [
            await stack.enter_async_context(start_encoder("llava_clip", redis_url=own_redis.url)) for _ in range(2)
        ]
        first, second = encoders
        sick_model.gate.clear()
        holding = asyncio.ensure_future(first.stub.Encode(request_of(9250)))
        await until(lambda: first.pipeline._encoder._batcher.running_s > 0)
        monkeypatch.setattr(EmbeddingStore, "stat", counted)
        waiting = asyncio.ensure_future(second.stub.Encode(request_of(9250)))
        await until(lambda: len(looks) >= 10)
        assert second.metric("lookonce_encoder_cache_queries_total", tier="shared") == 1
        sick_model.gate.set()
        await asyncio.gather(holding, waiting)
        assert encodes(encoders) == 1
        assert first.pipeline.tiers.num_hits_and_misses("shared") == (0, 1)
        assert second.pipeline.tiers.num_hits_and_misses("shared") == (1, 1)


async def test_an_image_that_everybody_left_is_encoded_by_the_replica_that_is_asked_next(
    start_encoder: StartEncoder, sick_model: SickModel, own_redis: EmbeddedRedis
) -> None:
    async with AsyncExitStack() as stack:
        encoders = [
            await stack.enter_async_context(start_encoder("llava_clip", redis_url=own_redis.url)) for _ in range(2)
        ]
        first, second = encoders
        client = stack.enter_context(redis.Redis.from_url(own_redis.url))
        sick_model.gate.clear()
        running = asyncio.ensure_future(first.stub.Encode(request_of(9200)))
        await until(lambda: first.pipeline._encoder._batcher.running_s > 0)
        left = first.stub.Encode(request_of(9201))
        await until(lambda: len(first.pipeline._encoder._batcher._queue) == 1)
        assert len(list(client.scan_iter("lookonce:*:l"))) == 2
        other = second.stub.Encode(request_of(9201))
        await until(lambda: bool(second.pipeline._fleet._done._listeners))
        left.cancel()
        await until(lambda: second.pipeline._encoder._batcher.running_s > 0)
        sick_model.gate.set()
        await asyncio.gather(running, other)
        assert encodes(encoders) == 2
        await until(lambda: not list(client.scan_iter("lookonce:*:l")))


@pytest.mark.parametrize("seed", range(3))
async def test_whoever_joins_and_leaves_each_image_is_encoded_by_one_replica(
    seed: int, start_encoder: StartEncoder, sick_model: SickModel, own_redis: EmbeddedRedis
) -> None:
    rng = random.Random(seed)
    patient = {"redis_url": own_redis.url, "redis_budget_s": 10.0, "encode_lease_s": 60.0, "max_prepared_bytes": 1}
    async with AsyncExitStack() as stack:
        encoders = [await stack.enter_async_context(start_encoder("llava_clip", **patient)) for _ in range(3)]
        client = stack.enter_context(redis.Redis.from_url(own_redis.url))
        calls: list[Any] = []
        for _ in range(150):
            choice = rng.random()
            if choice < 0.55 or not calls:
                calls.append(rng.choice(encoders).stub.Encode(request_of(9300 + rng.randrange(8))))
            elif choice < 0.9:
                calls.pop(rng.randrange(len(calls))).cancel()
            elif rng.random() < 0.5:
                sick_model.gate.set()
            else:
                sick_model.gate.clear()
            await asyncio.sleep(rng.choice((0, 0.002, 0.01)))
        sick_model.gate.set()
        answers = [await call for call in calls]
        assert len({answer.results[0].embedding.key.digest for answer in answers}) <= encodes(encoders) <= 8
        assert all(answer.results[0].stored for answer in answers)
        await until(lambda: not any(len(encoder.pipeline._flights) for encoder in encoders))
        await until(lambda: not list(client.scan_iter("lookonce:*:l")))


async def test_a_hiccup_of_redis_costs_no_second_encode(start_encoder: StartEncoder, own_redis: EmbeddedRedis) -> None:
    async with AsyncExitStack() as stack:
        encoders = [
            await stack.enter_async_context(start_encoder("llava_clip", redis_url=own_redis.url)) for _ in range(4)
        ]
        await asyncio.gather(*(encoder.stub.Encode(request_of(9050)) for encoder in encoders))
        os.kill(own_redis.pid, signal.SIGSTOP)
        asking = asyncio.gather(*(encoder.stub.Encode(request_of(9051)) for encoder in encoders for _ in range(50)))
        # Longer than one look-up and one attempt to get the lease may take.
        await asyncio.sleep(0.65)
        os.kill(own_redis.pid, signal.SIGCONT)
        answers = await asking
        assert encodes(encoders) == 2
        assert all(answer.results[0].stored for answer in answers)


async def test_a_thousand_requests_over_fifty_images_encode_each_once(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis
) -> None:
    requests = [request_of(9100 + seed) for seed in range(50)]
    rng = random.Random(3)
    # Four encoders and a thousand callers share this process. A late answer must not count as an unreachable Redis, in
    # which case each encoder rightly encodes for itself.
    patient = {"redis_url": own_redis.url, "redis_budget_s": 10.0, "encode_lease_s": 60.0}
    async with AsyncExitStack() as stack:
        encoders = [await stack.enter_async_context(start_encoder("llava_clip", **patient)) for _ in range(4)]
        asks = requests + [rng.choice(requests) for _ in range(950)]
        rng.shuffle(asks)
        await asyncio.gather(*(rng.choice(encoders).stub.Encode(ask) for ask in asks))
        assert encodes(encoders) == 50
