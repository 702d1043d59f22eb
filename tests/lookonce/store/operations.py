"""All operations of the store and the leases, with the conditions that hold whatever the server does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from encoder_svc.cache.encode_lease import EncodeLeases, LeaseAttempt, LeaseState
from lookonce.store.cache_names import lease_key
from lookonce.store.codec import EmbeddingCodec
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.metrics import StoreCollector
from lookonce.store.redis.circuit_breaker import CircuitBreaker
from lookonce.store.redis.miss_reason import MissReason
from lookonce.store.sealing import Checksum
from tests.lookonce.store.entries import SMALL, data_key, fresh_key, make_entry, make_rows, metadata_key, write
from tests.lookonce.store.redis.resp_server import Lie, RespServer

# Limit that detects a hang. An operation may take two budgets, one of them for removing a corrupt value.
HANG_S = 8.0
_LEASE_S = 30.0
_TOKEN = b"0" * 32
ROWS = make_rows(SMALL)
# Keys of the image under test, and of another one whose values a server may return instead.
_MAX_TRIES = 10
KEY, OTHER_KEY = fresh_key(), fresh_key()
# Range of rows for partial reads.
SOME = (2, 6)


@dataclass(frozen=True, slots=True)
class Client:
    """Store and leases of one service."""

    store: EmbeddingStore
    leases: EncodeLeases

    @classmethod
    def of(cls, make_store: Callable[..., EmbeddingStore], url: str, budget_s: float) -> Client:
        """Returns a client whose breaker never opens."""
        store = make_store(url, budget_s=budget_s, breaker=CircuitBreaker(failure_threshold=1_000_000))
        return cls(store, EncodeLeases(store, _LEASE_S))

    def read(self, *, wants_all: bool) -> MissReason | bytes:
        """Reads all rows of the image, or a part of them."""
        start, stop = (0, SMALL.num_rows) if wants_all else SOME
        out = memoryview(bytearray((stop - start) * SMALL.row_bytes))
        return self.store.read_rows(KEY, start, stop, out, num_rows=SMALL.num_rows) or bytes(out)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a service, with its valid results."""

    # Name of the operation in the counters.
    label: str
    run: Callable[[Client], Any]
    # Recognises a correct result. Every other result must satisfy `is_miss`.
    is_right: Callable[[Any], bool]
    is_miss: Callable[[Any], bool]
    # Whether the image is in the cache beforehand.
    is_cached: bool = True
    # Number of outcomes that are counted.
    num_outcomes: int = 1


def _is_sound(attempt: LeaseAttempt) -> bool:
    """Returns whether a held lease has a token and another replica's lease has a remaining time."""
    if attempt.state is LeaseState.HELD:
        return bool(attempt.token)
    return attempt.state is LeaseState.BUSY and not attempt.token and 0 <= attempt.remaining_s <= _LEASE_S


def _is_true(answer: bool) -> bool:
    return answer is True


def _is_false(answer: bool) -> bool:
    return answer is False


def _is_reason(answer: Any) -> bool:
    return isinstance(answer, MissReason)


def _is_none(answer: Any) -> bool:
    return answer is None


OPERATIONS = {
    "stat": Operation("stat", lambda client: client.store.stat(KEY), lambda meta: meta == SMALL, _is_none),
    "metadata": Operation("metadata", lambda client: client.store.metadata(KEY), lambda meta: meta == SMALL, _is_none),
    "read all rows": Operation(
        "read_rows", lambda client: client.read(wants_all=True), lambda rows: rows == ROWS, _is_reason
    ),
    "read some rows": Operation(
        "read_rows",
        lambda client: client.read(wants_all=False),
        lambda rows: rows == ROWS[SOME[0] * SMALL.row_bytes : SOME[1] * SMALL.row_bytes],
        _is_reason,
    ),
    "write": Operation(
        "write", lambda client: write(client.store, KEY, SMALL, memoryview(ROWS)), _is_true, _is_false, is_cached=False
    ),
    "write again": Operation(
        "write", lambda client: write(client.store, KEY, SMALL, memoryview(ROWS)), _is_true, _is_false
    ),
    "touch": Operation("touch", lambda client: client.store.touch(KEY), _is_true, _is_false),
    "ping": Operation("ping", lambda client: client.store.ping(), _is_true, _is_false),
    "acquire": Operation(
        "lease",
        lambda client: client.leases.acquire(OTHER_KEY),
        _is_sound,
        lambda attempt: attempt == LeaseAttempt(LeaseState.UNAVAILABLE),
    ),
    "acquire a lease that is held": Operation(
        "lease",
        lambda client: client.leases.acquire(KEY),
        _is_sound,
        lambda attempt: attempt == LeaseAttempt(LeaseState.UNAVAILABLE),
    ),
    "renew": Operation("lease", lambda client: client.leases.renew(KEY, _TOKEN), _is_true, _is_false),
    "release": Operation(
        "lease", lambda client: client.leases.release(KEY, _TOKEN, b"stored"), _is_true, _is_false, num_outcomes=2
    ),
}


@dataclass(slots=True)
class Bench:
    """A client of a server that may lie, and the real server behind it."""

    server: RespServer
    client: Client
    admin: Any
    collector: StoreCollector = field(init=False)

    def __post_init__(self) -> None:
        self.collector = StoreCollector(self.client.store, "test")

    def prepare(self, operation: Operation) -> None:
        """Puts the entry and the lease into the state that the operation expects."""
        plan = self.admin.pipeline(transaction=False)
        plan.delete(lease_key(OTHER_KEY))
        plan.set(data_key(OTHER_KEY), _OTHER_ENTRY)
        plan.set(metadata_key(OTHER_KEY), _OTHER_RECORD)
        plan.set(lease_key(KEY), _TOKEN, px=round(_LEASE_S * 1000))
        if operation.is_cached:
            plan.set(data_key(KEY), _ENTRY)
            plan.set(metadata_key(KEY), _RECORD)
        else:
            plan.delete(data_key(KEY), metadata_key(KEY))
        plan.execute()

    def commands_of(self, operation: Operation) -> list[bytes]:
        """Returns the commands that an operation sends to an honest server over a new connection."""
        self.prepare(operation)
        self.server.lie(None)
        answer, outcomes = self.outcome(operation)
        assert operation.is_right(answer)
        assert len(outcomes) == 1
        assert outcomes <= {"ok", "exists"}
        return self.server.commands

    def outcome_under(self, operation: Operation, lie: Lie) -> tuple[Any, set[str]]:
        """Returns (result, counted outcomes) of an operation under a lie, after checks that hold for every lie."""
        self.prepare(operation)
        self.server.lie(lie)
        return self.outcome(operation)

    def outcome(self, operation: Operation) -> tuple[Any, set[str]]:
        """Returns (result, counted outcomes) of an operation, after checks that hold for every server."""
        before = Counter(self.client.store.stats.snapshot())
        started_s = time.monotonic()
        answer = operation.run(self.client)
        assert time.monotonic() - started_s < HANG_S
        assert operation.is_right(answer) or operation.is_miss(answer), answer
        new = Counter(self.client.store.stats.snapshot()) - before
        outcomes = {outcome: count for (label, outcome), count in new.items() if label == operation.label}
        assert sum(outcomes.values()) == operation.num_outcomes
        assert {label for label, _ in new} <= {operation.label, "delete"}
        if isinstance(answer, MissReason):
            assert outcomes == {answer.value: 1}
        elif operation.is_miss(answer) and operation.label != "lease":
            assert not {"ok", "exists"} & set(outcomes)
        self.check_metrics()
        return answer, set(outcomes)

    def check_metrics(self) -> None:
        """Checks that every count except successes is exported as a metric."""
        visible = {
            (
                sample.labels.get("operation", "write"),
                sample.labels.get("reason") or sample.labels["outcome"],
            ): sample.value
            for family in self.collector.collect()
            for sample in family.samples
            if sample.name in ("lookonce_test_cache_miss_total", "lookonce_test_store_writes_total")
        }
        counted = self.client.store.stats.snapshot()
        expected = {label: count for label, count in counted.items() if label[0] == "write" or label[1] != "ok"}
        assert visible == expected

    def check_recovery(self) -> None:
        """Checks that the next results from an honest server are correct, so that nothing wrong was stored."""
        self.server.lie(None)
        found = self._read_in_time()
        if found is MissReason.ABSENT:
            assert write(self.client.store, KEY, SMALL, memoryview(ROWS))
            found = self._read_in_time()
        assert found == ROWS, found

    def _read_in_time(self) -> MissReason | bytes:
        """Reads again if the time of an operation is over, as it may be on a busy machine."""
        for _ in range(_MAX_TRIES):
            found = self.client.read(wants_all=True)
            if found not in (MissReason.TIMEOUT, MissReason.SLOW):
                break
        return found


_CODEC = EmbeddingCodec(Checksum())
_ENTRY, _RECORD = make_entry(KEY, SMALL, ROWS), _CODEC.pack_metadata(KEY.value, SMALL)
_OTHER_ENTRY = make_entry(OTHER_KEY, SMALL, make_rows(SMALL, seed=1))
_OTHER_RECORD = _CODEC.pack_metadata(OTHER_KEY.value, SMALL)
