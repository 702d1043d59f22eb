"""deploy/redis/users.acl lets each part do its work on a real server, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import pathlib
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from encoder_svc.cache.cache_admin import CacheAdmin
from encoder_svc.cache.done_channel import DoneChannel
from encoder_svc.cache.encode_lease import EncodeLeases, LeaseState
from lookonce.content_key import ContentKey
from lookonce.forgotten import Forgotten
from lookonce.local.redis_server import EmbeddedRedis, find_server
from lookonce.store.cache_names import pattern_of_fingerprint
from lookonce.store.embedding_store import EmbeddingStore, WriteOutcome
from lookonce.store.forget_channel import ForgetListener
from tests.lookonce.store.entries import SMALL, data_key, fresh_key, make_rows, read, write

USERS = pathlib.Path(__file__).parents[4] / "deploy/redis/users.acl"
ROLES = ("decoder", "encoder", "janitor")
TIMEOUT_S = 20.0

pytestmark = pytest.mark.skipif(
    find_server()[1] < (7, 0), reason="rules for subcommands and channels begin with Redis 7"
)
MakeStore = Callable[..., EmbeddingStore]


def password(role: str) -> str:
    return f"password-of-{role}"


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A server with these users, whose default user stays enabled for the test itself."""
    rules = USERS.read_text()
    for role in ROLES:
        digest = hashlib.sha256(password(role).encode()).hexdigest()
        rules = rules.replace(f"#SHA256_OF_{role.upper()}_PASSWORD", f"#{digest}")
    assert "SHA256_OF" not in rules.partition("user default")[2]
    lines = [line for line in rules.splitlines() if line.startswith("user lookonce")]
    with EmbeddedRedis(64 << 20, use_tcp=True, extra_settings=lines) as server:
        yield server


@pytest.fixture
def operator(server: EmbeddedRedis) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as client:
        yield client


def url_of(server: EmbeddedRedis, role: str) -> str:
    parts = urllib.parse.urlsplit(server.url)
    return f"redis://lookonce-{role}:{password(role)}@{parts.hostname}:{parts.port}"


def refusals(operator: Any) -> list[tuple[str, str]]:
    """Returns (user, command, key or channel) of everything that the rules refused."""
    return [(entry["username"], entry["object"]) for entry in operator.acl_log()]


def written(store: EmbeddingStore) -> ContentKey:
    key = fresh_key()
    assert write(store, key, SMALL, memoryview(make_rows(SMALL)))
    return key


def test_the_default_user_is_off() -> None:
    (default,) = (line for line in USERS.read_text().splitlines() if line.startswith("user default"))
    assert default == "user default off resetpass resetkeys resetchannels -@all"


@pytest.mark.parametrize("role", ["encoder", "janitor"])
def test_encoders_write_read_and_take_leases(
    server: EmbeddedRedis, operator: Any, make_store: MakeStore, role: str
) -> None:
    store = make_store(url_of(server, role))
    key = written(store)
    assert store.stat(key) == SMALL
    assert store.metadata(key) == SMALL
    assert read(store, key, SMALL, 0, SMALL.num_rows) == make_rows(SMALL)
    store.touch(key)
    operator.set(data_key(key), b"damaged")
    assert store.stat(key) is None
    assert not operator.exists(data_key(key))
    leases = EncodeLeases(store, ttl_s=5)
    attempt = leases.acquire(key)
    assert attempt.state is LeaseState.HELD
    assert leases.acquire(key).state is LeaseState.BUSY
    assert leases.renew(key, attempt.token)
    other = fresh_key()
    held = leases.acquire(other)
    rows = memoryview(make_rows(SMALL))
    assert store.try_write(other, SMALL, rows, lease_token=b"another's") is WriteOutcome.LEASE_LOST
    assert store.try_write(other, SMALL, rows, lease_token=held.token) is WriteOutcome.STORED
    assert store.try_write(other, SMALL, rows, lease_token=held.token) is WriteOutcome.EXISTS
    assert leases.release(key, attempt.token, b"stored")
    assert refusals(operator) == []


def test_decoders_read_and_remove_damaged_entries(server: EmbeddedRedis, operator: Any, make_store: MakeStore) -> None:
    encoder, decoder = make_store(url_of(server, "encoder")), make_store(url_of(server, "decoder"))
    key = written(encoder)
    assert decoder.metadata(key) == SMALL
    assert read(decoder, key, SMALL, 0, SMALL.num_rows) == make_rows(SMALL)
    operator.set(data_key(key), b"damaged")
    assert decoder.stat(key) is None
    assert not operator.exists(data_key(key))
    assert refusals(operator) == []
    assert not write(decoder, fresh_key(), SMALL, memoryview(make_rows(SMALL))), "it cannot plant rows"
    assert refusals(operator) == [("lookonce-decoder", "exists")]


async def test_decoders_have_no_right_that_they_do_not_use(
    server: EmbeddedRedis, operator: Any, make_store: MakeStore
) -> None:
    keys = [written(make_store(url_of(server, "encoder"))) for _ in range(2)]
    operator.set("lookonce:forgets", b"token")
    operator.move("lookonce:forgets", 1)
    for key in keys:
        operator.move(data_key(key), 1)
    operator.config_resetstat()
    # Options of the URL that cost a command each.
    decoder = make_store(f"{url_of(server, 'decoder')}/1?client_name=decoder")
    assert decoder.ping()
    assert decoder.metadata(keys[0]) is None
    out = bytearray(SMALL.size_bytes)
    for num_rows in (None, SMALL.num_rows):
        assert decoder.read_rows(keys[0], 0, SMALL.num_rows, memoryview(out), num_rows=num_rows) is None
    listener = ForgetListener(f"{url_of(server, 'decoder')}/1?client_name=decoder", 2.0, lambda forgotten: None)
    listener.start()
    async with asyncio.timeout(TIMEOUT_S):
        await listener.wait_until_listening()
    await listener.close()
    with redis.Redis.from_url(f"{server.url}/1") as other:
        other.set(data_key(keys[1]), b"damaged")
    assert decoder.stat(keys[1]) is None
    (rule,) = (line for line in USERS.read_text().splitlines() if line.startswith("user lookonce-decoder"))
    allowed = {word[1:] for word in rule.split() if word.startswith("+")}
    used = {name.removeprefix("cmdstat_") for name in operator.info("commandstats")}
    assert refusals(operator) == []
    # A cluster is asked for its slots. redis-py ends a subscription by UNSUBSCRIBE in some versions.
    assert allowed - used <= {"cluster|slots", "unsubscribe"}


async def test_messages_about_encodes_and_forgotten_images_arrive(
    server: EmbeddedRedis, operator: Any, make_store: MakeStore
) -> None:
    key, heard = fresh_key(), asyncio.Event()
    store = make_store(url_of(server, "encoder"))
    done = DoneChannel(url_of(server, "encoder"), 2.0)
    listeners = [
        ForgetListener(url_of(server, role), 2.0, lambda forgotten: heard.set()) for role in ("decoder", "encoder")
    ]
    done.start()
    for listener in listeners:
        listener.start()
    janitor = CacheAdmin(url_of(server, "janitor"))
    try:
        async with asyncio.timeout(TIMEOUT_S), done.listening(key) as end:
            while not done.is_connected or not all(listener.is_listening for listener in listeners):
                await asyncio.sleep(0.02)
            heard.clear()
            leases = EncodeLeases(store, ttl_s=5)
            attempt = await asyncio.to_thread(leases.acquire, key)
            await asyncio.to_thread(leases.release, key, attempt.token, b"stored")
            await end.wait(TIMEOUT_S)
            assert end.outcome == b"stored"
            await asyncio.to_thread(janitor.tell_to_forget, Forgotten.of([key]))
            await heard.wait()
    finally:
        await done.close()
        for listener in listeners:
            await listener.close()
        janitor.close()
    assert refusals(operator) == []


def test_janitors_look_at_pin_and_remove_entries(server: EmbeddedRedis, operator: Any, make_store: MakeStore) -> None:
    key = written(make_store(url_of(server, "encoder")))
    janitor = CacheAdmin(url_of(server, "janitor"))
    pattern = pattern_of_fingerprint(key.fingerprint)
    assert janitor.totals(pattern).num_entries == 1
    assert janitor.pin([key]) == [True]
    (entry,) = janitor.describe([key])
    assert entry is not None
    assert entry.ttl_s is None
    assert janitor.unpin([key], 60) == [True]
    leases = EncodeLeases(make_store(url_of(server, "encoder")), ttl_s=30)
    held = leases.acquire(key)
    janitor.revoke_leases([key])
    assert not leases.renew(key, held.token)
    held = leases.acquire(key)
    janitor.revoke_leases_in(pattern, [bytes(32)])
    assert not leases.renew(key, held.token)
    assert janitor.evict_matching(pattern) == 1
    janitor.close()
    assert refusals(operator) == []


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("EVAL", "return 1", "0"),
        ("SCRIPT", "FLUSH"),
        ("FUNCTION", "LIST"),
        ("SHUTDOWN",),
        ("ACL", "WHOAMI"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("MONITOR",),
        ("REPLICAOF", "127.0.0.1", "1"),
        ("GET", "another:key"),
        ("UNLINK", "another:key"),
        ("PUBLISH", "another:channel", "x"),
        ("SUBSCRIBE", "another:channel"),
        ("PSUBSCRIBE", "*"),
    ],
    ids="-".join,
)
def test_no_role_may_run_other_commands(
    server: EmbeddedRedis, operator: Any, role: str, command: tuple[str, ...]
) -> None:
    with (
        redis.Redis.from_url(url_of(server, role)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command)
    assert operator.ping()


@pytest.mark.parametrize(
    "command",
    [
        ("SET", "lookonce:f:t:{k}:e", "1"),
        ("PUBLISH", "lookonce:forget", "x"),
        ("SUBSCRIBE", "lookonce:f:t:{k}:d"),
        ("SCAN", "0"),
        ("INFO",),
        ("EXISTS", "lookonce:f:t:{k}:e"),
        ("PTTL", "lookonce:f:t:{k}:e"),
        ("PEXPIRE", "lookonce:f:t:{k}:e", "1"),
        ("GET", "lookonce:f:t:{k}:l"),
        ("UNLINK", "lookonce:f:t:{k}:l"),
        ("UNLINK", "lookonce:forgets"),
        ("GET", "lookonce:x"),
    ],
    ids="-".join,
)
def test_decoders_change_nothing_and_list_nothing_and_see_no_lease(
    server: EmbeddedRedis, operator: Any, command: tuple[str, ...]
) -> None:
    with (
        redis.Redis.from_url(url_of(server, "decoder")) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command)
    assert refusals(operator)[0][0] == "lookonce-decoder"
