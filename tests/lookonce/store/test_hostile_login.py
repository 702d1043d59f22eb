"""A server that misbehaves while a client logs in is a counted miss like any other, in time."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.store.faults import FaultProxy
from tests.lookonce.store.operations import OPERATIONS, Bench, Client, Operation
from tests.lookonce.store.redis.resp_server import After, Lie, RespServer, changed, instead
from tests.lookonce.store.replies import CHANGES, ERRORS, NASTY, REPLIES

MakeStore = Callable[..., EmbeddingStore]

BUDGET_S = 2.0
# Commands of a new connection before the first operation.
LOGIN = [b"AUTH", b"SELECT"]
PING = OPERATIONS["ping"]


@pytest.fixture
def bench(own_redis: EmbeddedRedis, make_store: MakeStore) -> Iterator[Bench]:
    """A client that logs in and selects a database of its own."""
    with redis.Redis.from_url(own_redis.url) as admin:
        admin.execute_command("ACL", "SETUSER", "user", "on", ">pw", "~*", "&*", "+@all")
    server = RespServer(own_redis.url)
    with redis.Redis.from_url(own_redis.url + "?db=3") as admin:
        yield Bench(server, Client.of(make_store, with_login(server.url), BUDGET_S), admin)
    server.close()


def with_login(url: str) -> str:
    return url.replace("://", "://user:pw@") + "?db=3"


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_error_at_login_is_a_miss_for_its_reason(bench: Bench, operation: Operation) -> None:
    assert bench.commands_of(operation)[:2] == LOGIN
    for at in range(len(LOGIN)):
        for text, reason in ERRORS.items():
            answer, outcomes = bench.outcome_under(operation, Lie(at, instead(b"-" + text + b"\r\n")))
            assert operation.is_miss(answer)
            # An error without a known code counts as AUTH if it is the reply to the password.
            is_refusal = at == 0 and reason is MissReason.SERVER_ERROR
            expected = MissReason.AUTH if is_refusal else reason
            # The end of a lease is announced even without the lease, over another connection.
            assert outcomes - {"ok"} == {expected.value}
    bench.check_recovery()


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_malformed_reply_at_login_is_a_miss_or_harmless(bench: Bench, operation: Operation) -> None:
    for at in range(len(LOGIN)):
        for reply in NASTY:
            bench.outcome_under(operation, Lie(at, instead(reply), linger_s=0.01))
    bench.check_recovery()


def test_no_reply_at_login_leads_to_a_wrong_row(bench: Bench) -> None:
    @settings(max_examples=300, derandomize=True, database=None)
    @given(
        st.sampled_from(list(OPERATIONS)),
        st.integers(0, 1),
        REPLIES.map(instead) | CHANGES.map(changed),
        st.sampled_from([After.GO_ON, After.CLOSE]),
    )
    def check(name: str, at: int, tell: Callable[[int, bytes], bytes], after: After) -> None:
        bench.outcome_under(OPERATIONS[name], Lie(at, tell, after, linger_s=0.01))
        bench.check_recovery()

    check()


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("said", [b"", b"+O"])
def test_silence_at_login_costs_no_more_than_the_budget(
    bench: Bench, make_store: MakeStore, at: int, said: bytes
) -> None:
    hasty = Bench(bench.server, Client.of(make_store, with_login(bench.server.url), 0.2), bench.admin)
    for name in ("stat", "read all rows", "write", "acquire"):
        answer, outcomes = hasty.outcome_under(OPERATIONS[name], Lie(at, instead(said), After.STALL))
        assert OPERATIONS[name].is_miss(answer)
        assert outcomes <= {MissReason.TIMEOUT.value, MissReason.SLOW.value}
    bench.check_recovery()


def test_a_login_that_trickles_without_end_costs_no_more_than_the_budget(
    own_redis: EmbeddedRedis, bench: Bench, make_store: MakeStore
) -> None:
    proxy = FaultProxy(urllib.parse.unquote(urllib.parse.urlsplit(own_redis.url).path))
    proxy.faults.pause_s = 0.05
    proxy.faults.forged_reply = b"+" + b"O" * 10_000
    try:
        slow = Bench(bench.server, Client.of(make_store, with_login(proxy.url), 0.2), bench.admin)
        answer, _ = slow.outcome(PING)
        assert PING.is_miss(answer)
    finally:
        proxy.close()
