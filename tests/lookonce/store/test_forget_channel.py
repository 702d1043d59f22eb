"""A listener receives every message about images to forget, or forgets all images when it may have missed one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest
import redis

from encoder_svc.cache.cache_admin import CacheAdmin
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.forget_channel import token_in
from tests.lookonce.store.entries import fresh_key
from tests.lookonce.store.faults import kill_child
from tests.lookonce.store.forget_listening import listening, reconnected


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A server that the test may break."""
    with EmbeddedRedis(64 << 20) as server:
        yield server


async def test_a_listener_that_missed_a_message_while_cut_off_forgets_everything(server: EmbeddedRedis) -> None:
    with contextlib.closing(CacheAdmin(server.url)) as admin, redis.Redis.from_url(server.url) as operator:
        async with listening(server.url) as (listener, heard):
            await listener.wait_until_listening()
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
            await heard.get()
            operator.client_kill_filter(_type="pubsub")
            await reconnected(listener)
            assert heard.empty(), "nothing was said while it was away"
            # Simulates a message that did not reach the listener.
            operator.set("lookonce:forgets", "another token")
            operator.client_kill_filter(_type="pubsub")
            await reconnected(listener)
            assert heard.get_nowait() == EVERYTHING


async def test_a_silently_dead_subscription_is_detected(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(server.url) as operator:
        async with listening(server.url, check_s=0.1) as (listener, heard):
            await listener.wait_until_listening()
            operator.set("lookonce:forgets", "a token whose message never came")
            assert await heard.get() == EVERYTHING


async def test_a_message_around_a_restart_of_redis_is_not_missed(server: EmbeddedRedis) -> None:
    with contextlib.closing(CacheAdmin(server.url)) as admin:
        async with listening(server.url) as (listener, heard):
            await listener.wait_until_listening()
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
            await heard.get()
            kill_child(server.pid)
            server.start()
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
            assert await heard.get() == EVERYTHING


async def test_a_message_from_before_the_first_connection_is_detected(server: EmbeddedRedis) -> None:
    kill_child(server.pid)
    async with listening(server.url) as (listener, heard):
        await asyncio.sleep(0.1)
        assert not listener.is_listening
        server.start()
        with contextlib.closing(CacheAdmin(server.url)) as admin:
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
        assert await heard.get() == EVERYTHING


async def test_the_last_token_is_that_of_the_cache_and_unknown_without_a_connection(server: EmbeddedRedis) -> None:
    with (
        contextlib.closing(CacheAdmin(server.url)) as admin,
        contextlib.closing(EmbeddingStore(server.url, 2.0, 60, 1 << 20)) as store,
    ):
        async with listening(server.url) as (listener, heard):
            assert [listener.last_token] == [None]
            await listener.wait_until_listening()
            assert listener.last_token == token_in(store) == b""
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
            await heard.get()
            assert listener.last_token == await asyncio.to_thread(token_in, store)
            assert listener.last_token


async def test_what_was_removed_since_a_token_is_known(server: EmbeddedRedis) -> None:
    removed, kept, token_of_nobody = fresh_key(), fresh_key(), b"0" * 32
    with contextlib.closing(CacheAdmin(server.url)) as admin:
        async with listening(server.url) as (listener, heard):
            assert [listener.heard_token] == [None]
            await listener.wait_until_listening()
            before = listener.heard_token
            assert before == b""
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([removed]))
            await heard.get()
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
            await heard.get()
            after = listener.heard_token
            assert after not in (None, before)
            for token, key, was_removed in (
                (before, removed, True),
                (before, kept, False),
                (after, removed, False),
                (token_of_nobody, kept, True),
            ):
                assert listener.removed_since(token, key.value, ()) == was_removed
        # A new process cannot know what was removed before it.
        async with listening(server.url) as (listener, heard):
            await listener.wait_until_listening()
            assert listener.removed_since(before, kept.value, ())
            assert not listener.removed_since(after, kept.value, ())


def test_the_stored_token_is_unknown_without_redis(
    server: EmbeddedRedis, make_store: Callable[..., EmbeddingStore]
) -> None:
    store = make_store(server.url)
    assert token_in(store) == b""
    kill_child(server.pid)
    assert token_in(store) is None
