"""Announcements reach the listeners of their key only, and without Redis there is silence, never an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import redis

from encoder_svc.cache.done_channel import DoneChannel
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import done_channel
from tests.lookonce.store.entries import fresh_key

TIMEOUT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def done(shared_redis: EmbeddedRedis) -> AsyncIterator[DoneChannel]:
    """A channel whose subscription is connected."""
    channel = DoneChannel(shared_redis.url, 1.0)
    channel.start()
    await until(lambda: channel.is_connected)
    yield channel
    await channel.close()


@pytest.fixture
def client(shared_redis: EmbeddedRedis) -> redis.Redis:
    """The connection of another replica, which publishes."""
    return redis.Redis.from_url(shared_redis.url)


async def test_an_announcement_wakes_all_listeners_of_its_key_and_no_others(
    done: DoneChannel, client: redis.Redis
) -> None:
    mine, other = fresh_key(), fresh_key()
    with client:
        async with done.listening(mine) as first, done.listening(mine) as second, done.listening(other) as stranger:
            # Redis counts subscribed connections: the process has one, for both listeners.
            await until(lambda: client.pubsub_numsub(done_channel(other))[0][1] == 1)
            assert client.publish(done_channel(mine), b"stored") == 1
            assert await first.wait(TIMEOUT_S)
            assert await second.wait(TIMEOUT_S)
            assert first.outcome == second.outcome == b"stored"
            assert stranger.outcome is None


async def test_the_last_listener_of_a_key_ends_its_subscription(done: DoneChannel, client: redis.Redis) -> None:
    key = fresh_key()

    def num_subscribed() -> int:
        return int(client.pubsub_numsub(done_channel(key))[0][1])

    with client:
        async with done.listening(key):
            async with done.listening(key):
                await until(lambda: num_subscribed() == 1)
            assert num_subscribed() == 1
        await until(lambda: num_subscribed() == 0)
        async with done.listening(key) as again:
            await until(lambda: num_subscribed() == 1)
            client.publish(done_channel(key), b"failed")
            assert await again.wait(TIMEOUT_S)


async def test_a_listener_that_subscribes_before_the_connection_gets_messages_after_it(
    client: redis.Redis, shared_redis: EmbeddedRedis
) -> None:
    key = fresh_key()
    channel = DoneChannel(shared_redis.url, 1.0)
    with client:
        async with channel.listening(key) as listener:
            assert not channel.is_connected
            channel.start()
            await until(lambda: channel.is_connected)
            client.publish(done_channel(key), b"stored")
            assert await listener.wait(TIMEOUT_S)
    await channel.close()


async def test_a_listener_that_is_cancelled_while_it_subscribes_ends(
    done: DoneChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py may raise a TimeoutError in place of the cancellation."""
    has_begun = asyncio.Event()

    async def subscribe(*_: bytes) -> None:
        has_begun.set()
        try:
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            raise TimeoutError from None

    async def listen() -> None:
        async with done.listening(fresh_key()) as listener:
            await listener.wait(TIMEOUT_S)

    monkeypatch.setattr(done._subscription, "subscribe", subscribe)
    listening = asyncio.create_task(listen())
    await has_begun.wait()
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    assert not done._listeners


async def test_without_redis_a_listener_hears_nothing_and_nothing_is_raised(own_redis: EmbeddedRedis) -> None:
    channel = DoneChannel(own_redis.url, 0.1)
    own_redis.stop()
    channel.start()
    async with channel.listening(fresh_key()) as listener:
        assert not await listener.wait(0.05)
        assert not channel.is_connected
    await channel.close()
