"""Whatever a server replies, breaks off or withholds: correct rows or a counted miss in time, and recovery after it.

Every operation of the store and of the leases meets every kind of misbehaviour at every one of its commands.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_svc.cache.encode_lease import LeaseAttempt, LeaseState
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import lease_key
from lookonce.store.codec import HEADER_BYTES
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.circuit_breaker import BreakerState, CircuitBreaker
from lookonce.store.redis.miss_reason import MissReason
from lookonce.store.sealing import Checksum
from tests.lookonce.store.damage import flip
from tests.lookonce.store.entries import LARGE, SMALL, data_key, fresh_key, make_entry, make_rows
from tests.lookonce.store.faults import FaultProxy
from tests.lookonce.store.forgery import reseal
from tests.lookonce.store.operations import KEY, OPERATIONS, OTHER_KEY, ROWS, Bench, Client, Operation
from tests.lookonce.store.redis.resp_server import After, Lie, RespServer, changed, instead, swapped
from tests.lookonce.store.replies import CHANGES, ERRORS, NASTY, REPLIES

MakeStore = Callable[..., EmbeddingStore]

BUDGET_S = 2.0
# Budget for servers that do not reply.
SHORT_BUDGET_S = 0.1
# Commands whose replies do not affect the result.
TRIFLES = {b"HELLO", b"INFO"}
ENDS = [After.GO_ON, After.CLOSE]
LATE = {MissReason.TIMEOUT.value, MissReason.SLOW.value}
EVERY_OPERATION = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


@pytest.fixture
def bench(shared_redis: EmbeddedRedis, shared_admin: Any, make_store: MakeStore) -> Iterator[Bench]:
    """A client of a server that may lie, and the real server behind it."""
    server = RespServer(shared_redis.url)
    yield Bench(server, Client.of(make_store, server.url, BUDGET_S), shared_admin)
    server.close()


# --- errors ---------------------------------------------------------------------------------------------------------


@EVERY_OPERATION
def test_every_error_at_every_command_is_a_miss_for_its_reason(bench: Bench, operation: Operation) -> None:
    for at, command in enumerate(bench.commands_of(operation)):
        for text, reason in ERRORS.items():
            answer, outcomes = bench.outcome_under(operation, Lie(at, instead(b"-" + text + b"\r\n")))
            if command in TRIFLES:
                assert operation.is_right(answer)
                assert outcomes == {"ok"}
            else:
                assert reason.value in outcomes
                assert outcomes <= {reason.value, "ok"}
            bench.check_recovery()


# --- malformed replies, and replies to other commands ---------------------------------------------------------------


@EVERY_OPERATION
def test_every_malformed_reply_at_every_command_is_a_miss_or_harmless(bench: Bench, operation: Operation) -> None:
    for at in range(len(bench.commands_of(operation))):
        for reply in NASTY:
            bench.outcome_under(operation, Lie(at, instead(reply), linger_s=0.01))
            bench.check_recovery()


@pytest.mark.parametrize("name", ["stat", "metadata", "read all rows", "read some rows"])
def test_a_flipped_bit_of_a_reply_changes_no_answer(bench: Bench, name: str) -> None:
    operation = OPERATIONS[name]
    for at in range(len(bench.commands_of(operation))):
        for offset in [*range(200), *range(HEADER_BYTES - 20, HEADER_BYTES + SMALL.size_bytes, 5)]:
            answer, _ = bench.outcome_under(operation, Lie(at, changed(flip([(offset, offset % 8)])), linger_s=0.01))
            assert operation.is_right(answer) or operation.is_miss(answer)
        bench.check_recovery()


def test_no_reply_leads_to_a_wrong_row(bench: Bench) -> None:
    num_commands = {name: len(bench.commands_of(operation)) for name, operation in OPERATIONS.items()}
    moments = [(name, at) for name, count in num_commands.items() for at in range(count)]
    tally: Counter[str] = Counter()

    @settings(max_examples=600, derandomize=True, database=None)
    @given(st.sampled_from(moments), REPLIES.map(instead) | CHANGES.map(changed), st.sampled_from(ENDS))
    def check(moment: tuple[str, int], tell: Callable[[int, bytes], bytes], after: After) -> None:
        operation, at = OPERATIONS[moment[0]], moment[1]
        answer, _ = bench.outcome_under(operation, Lie(at, tell, after, linger_s=0.01))
        tally["miss" if operation.is_miss(answer) else "right"] += 1
        bench.check_recovery()

    check()
    assert min(tally["miss"], tally["right"]) > 80


@EVERY_OPERATION
@pytest.mark.parametrize(
    "make_tell",
    [
        pytest.param(swapped, id="in the wrong order"),
        pytest.param(lambda: changed(lambda true: true + true), id="twice"),
        pytest.param(lambda: instead(b""), id="not at all"),
        pytest.param(lambda: changed(lambda true: b"+OK\r\n" + true), id="one too many before"),
        pytest.param(lambda: changed(lambda true: true + b"$3\r\nabc\r\n"), id="one too many behind"),
        pytest.param(lambda: lambda later, true: b":1\r\n", id="one for all"),
    ],
)
def test_replies_to_other_commands_change_no_result(
    bench: Bench, operation: Operation, make_tell: Callable[[], Callable[[int, bytes], bytes]]
) -> None:
    for at in range(len(bench.commands_of(operation))):
        bench.outcome_under(operation, Lie(at, make_tell(), linger_s=0.02))
        bench.check_recovery()


@EVERY_OPERATION
@pytest.mark.parametrize("goes_on", [False, True])
def test_the_reply_about_another_image_is_never_taken_for_this_one(
    bench: Bench, operation: Operation, goes_on: bool
) -> None:
    def ask(later: int, command: bytes) -> bytes:
        return command.replace(KEY.hex.encode(), OTHER_KEY.hex.encode()) if goes_on or not later else command

    outcomes: set[str] = set()
    for at in range(len(bench.commands_of(operation))):
        outcomes |= bench.outcome_under(operation, Lie(at, lambda later, true: true, ask=ask))[1]
        bench.check_recovery()
    if operation.label in ("stat", "metadata", "read_rows"):
        assert MissReason.WRONG_KEY.value in outcomes


@pytest.mark.parametrize("name", ["stat", "read some rows", "read all rows"])
def test_a_forged_size_beyond_all_memory_is_a_miss(bench: Bench, name: str) -> None:
    """A checksum needs no secret, so the owner of the server can describe an entry larger than any memory."""
    operation, huge = OPERATIONS[name], (1 << 32) - 1
    size = HEADER_BYTES + huge * SMALL.row_bytes
    changed_header = bytearray(make_entry(KEY, SMALL, ROWS)[:HEADER_BYTES])
    struct.pack_into("<I", changed_header, 48, huge)
    struct.pack_into("<IIIQ", changed_header, 68, SMALL.row_bytes, huge, 1, huge * SMALL.row_bytes)
    header = reseal(bytes(changed_header), Checksum())
    commands = bench.commands_of(operation)
    # On some servers one command returns the header and all rows.
    if b"GET" in commands:
        at, replies = commands.index(b"GET"), [b"$%d\r\n%b" % (size, header)]
    else:
        at, replies = commands.index(b"GETRANGE"), [b"$%d\r\n%b\r\n" % (HEADER_BYTES, header), b":%d\r\n" % size]

    def tell(later: int, true: bytes) -> bytes:
        return replies[later] if later < len(replies) else true

    answer, outcomes = bench.outcome_under(operation, Lie(at, tell))
    assert operation.is_miss(answer)
    assert outcomes == {MissReason.LENGTH.value}
    bench.check_recovery()


def test_a_lease_that_never_expires_is_ignored(bench: Bench) -> None:
    bench.server.lie(None)
    bench.admin.set(lease_key(KEY), b"nobody")
    answer, outcomes = bench.outcome(OPERATIONS["acquire a lease that is held"])
    assert answer == LeaseAttempt(LeaseState.UNAVAILABLE)
    assert outcomes == {MissReason.WRONG_TYPE.value}


# --- replies that break off, or never come --------------------------------------------------------------------------


@EVERY_OPERATION
def test_a_connection_cut_at_any_length_is_a_miss_in_time(
    bench: Bench, fault_proxy: FaultProxy, make_store: MakeStore, operation: Operation
) -> None:
    for cut_after_bytes in [0, *(1 << power for power in range(14))]:
        client = Client.of(make_store, fault_proxy.url, BUDGET_S)
        cut_bench = Bench(bench.server, client, bench.admin)
        cut_bench.prepare(operation)
        fault_proxy.faults.cut_after_bytes = cut_after_bytes
        answer, outcomes = cut_bench.outcome(operation)
        assert operation.is_right(answer) or MissReason.CLOSED.value in outcomes
        fault_proxy.faults.cut_after_bytes = None
        cut_bench.check_recovery()
        client.store.close()


@pytest.mark.parametrize("wants_all", [True, False])
def test_a_large_read_cut_at_any_length_is_a_miss_in_time(
    fault_proxy: FaultProxy, shared_admin: Any, make_store: MakeStore, wants_all: bool
) -> None:
    key, rows, out = fresh_key(), make_rows(LARGE), bytearray(LARGE.size_bytes)
    shared_admin.set(data_key(key), make_entry(key, LARGE, rows))
    for cut_after_bytes in [0, *(1 << power for power in range(23))]:
        store = Client.of(make_store, fault_proxy.url, BUDGET_S).store
        num_rows = LARGE.num_rows if wants_all else None
        fault_proxy.faults.cut_after_bytes = cut_after_bytes
        assert store.read_rows(key, 0, LARGE.num_rows, memoryview(out), num_rows=num_rows) is MissReason.CLOSED
        fault_proxy.faults.cut_after_bytes = None
        assert store.read_rows(key, 0, LARGE.num_rows, memoryview(out), num_rows=num_rows) is None
        assert out == rows
        store.close()


@EVERY_OPERATION
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_silence_at_every_command_costs_no_more_than_the_budget(
    bench: Bench, make_store: MakeStore, operation: Operation, part: float
) -> None:
    hasty = Bench(bench.server, Client.of(make_store, bench.server.url, SHORT_BUDGET_S), bench.admin)
    for at in range(len(bench.commands_of(operation))):
        lie = Lie(at, changed(lambda true: true[: int(part * len(true))]), After.STALL)
        answer, outcomes = hasty.outcome_under(operation, lie)
        # A lease is released before its end is announced.
        assert operation.is_miss(answer) or "ok" in outcomes
        assert outcomes & LATE
        bench.check_recovery()


@EVERY_OPERATION
def test_replies_that_trickle_cost_no_more_than_the_budget(
    bench: Bench, fault_proxy: FaultProxy, make_store: MakeStore, operation: Operation
) -> None:
    hasty = Bench(bench.server, Client.of(make_store, fault_proxy.url, SHORT_BUDGET_S), bench.admin)
    hasty.prepare(operation)
    fault_proxy.faults.pause_s = 0.03
    answer, outcomes = hasty.outcome(operation)
    assert operation.is_right(answer) or outcomes & LATE
    fault_proxy.faults.pause_s = 0.0
    bench.check_recovery()


# --- recovery -------------------------------------------------------------------------------------------------------


def test_a_liar_opens_the_breaker_and_an_honest_server_closes_it(bench: Bench, make_store: MakeStore) -> None:
    now_s = [0.0]
    store = make_store(bench.server.url, breaker=CircuitBreaker(clock=lambda: now_s[0]))
    bench.prepare(OPERATIONS["stat"])
    bench.server.lie(Lie(0, lambda later, true: b"?\r\n"))
    assert [store.stat(KEY) for _ in range(5)] == [None] * 5
    states = [store.state]
    assert store.stats.snapshot() == {("stat", "protocol"): 3, ("stat", "breaker_open"): 2}
    bench.server.lie(None)
    assert store.stat(KEY) is None
    now_s[0] += 1.0
    assert store.stat(KEY) == SMALL
    assert [*states, store.state] == [BreakerState.OPEN, BreakerState.CLOSED]
