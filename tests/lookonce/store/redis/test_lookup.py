"""Lookups of the topology happen when they are due, once for all threads, and end at their deadline."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lookonce.store.redis.lookup import Lookup, TopologySources
from lookonce.store.redis.miss_reason import MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.url import Address, parse_redis_url

PATIENCE_S = 5.0
A, B, C = (Address(host, 1) for host in "abc")


class Truth:
    """A source for lookups that counts them, and fails or waits when the test says so."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.trouble: RedisTroubleError | None = None
        self.has_begun = threading.Event()
        # While cleared, a lookup does not end.
        self.may_end = threading.Event()
        self.may_end.set()

    def look(self, until_s: float) -> None:
        self.num_looks += 1
        self.has_begun.set()
        assert self.may_end.wait(2 * PATIENCE_S)
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture
def truth() -> Truth:
    return Truth()


@pytest.fixture
def lookup(truth: Truth) -> Lookup:
    return Lookup(truth.look)


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_a_lookup_runs_once_and_again_after_a_certain_change(lookup: Lookup, truth: Truth) -> None:
    lookup.run(soon())
    lookup.run(soon())
    assert truth.num_looks == 1
    lookup.make_due(at_once=True)
    lookup.run(soon())
    lookup.run(soon())
    assert truth.num_looks == 2


def test_trouble_prompts_a_lookup_only_after_the_pause(lookup: Lookup, truth: Truth) -> None:
    lookup.run(soon())
    for _ in range(100):
        lookup.make_due()
        lookup.run(soon())
    assert truth.num_looks < 50, "every doubt is a question"
    give_up_at_s = soon()
    while truth.num_looks < 2:
        assert time.monotonic() < give_up_at_s
        time.sleep(0.01)
        lookup.run(soon())


def test_failed_lookups_raise_only_until_the_first_success(lookup: Lookup, truth: Truth) -> None:
    truth.trouble = RedisTroubleError(MissReason.AUTH)
    for expected in (1, 2):
        with pytest.raises(RedisTroubleError) as caught:
            lookup.run(soon())
        assert (caught.value.reason, truth.num_looks) == (MissReason.AUTH, expected)
    truth.trouble = None
    lookup.run(soon())
    truth.trouble = RedisTroubleError(MissReason.AUTH)
    lookup.make_due(at_once=True)
    lookup.run(soon())
    assert truth.num_looks == 4


def test_concurrent_threads_share_one_lookup(lookup: Lookup, truth: Truth) -> None:
    truth.may_end.clear()
    threads = [threading.Thread(target=lookup.run, args=(soon(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert truth.has_begun.wait(PATIENCE_S)
    truth.may_end.set()
    for thread in threads:
        thread.join()
    assert truth.num_looks == 1


def test_a_thread_waits_for_another_until_its_deadline_only(lookup: Lookup, truth: Truth) -> None:
    for is_known in (False, True):
        truth.has_begun.clear()
        truth.may_end.clear()
        lookup.make_due(at_once=True)
        looking = threading.Thread(target=lookup.run, args=(soon(),))
        looking.start()
        assert truth.has_begun.wait(PATIENCE_S)
        if is_known:
            lookup.run(time.monotonic() + 0.05)
        else:
            with pytest.raises(RedisTroubleError) as caught:
                lookup.run(time.monotonic() + 0.05)
            assert caught.value.reason is MissReason.TIMEOUT
        truth.may_end.set()
        looking.join()


def test_no_lookup_starts_after_the_deadline(lookup: Lookup, truth: Truth) -> None:
    with pytest.raises(RedisTroubleError) as caught:
        lookup.run(time.monotonic())
    assert (caught.value.reason, truth.num_looks) == (MissReason.SLOW, 0)
    lookup.run(soon())
    lookup.make_due(at_once=True)
    lookup.run(time.monotonic())
    assert truth.num_looks == 1
    lookup.run(soon())
    assert truth.num_looks == 2


# --- the order of sources -------------------------------------------------------------------------------------------


class Questions:
    """Questions that record the servers they are put to, without a connection."""

    def __init__(self, *silent: Address) -> None:
        self.asked: list[Address] = []
        self.silent = set(silent)

    def ask(self, node: RedisNode, deadline_s: float) -> Address:
        assert node.address is not None
        self.asked.append(node.address)
        if node.address in self.silent:
            raise RedisTroubleError(MissReason.CLOSED)
        return node.address


def sources() -> TopologySources:
    return TopologySources(parse_redis_url("redis+cluster://a:1,b:1,c:1"), PATIENCE_S)


def test_a_source_that_failed_is_asked_last() -> None:
    several, questions = sources(), Questions(B, C)
    several.ask_last(A)
    assert several.ask(questions.ask, soon()) == A
    assert {*questions.asked[:2]} == {B, C}
    questions.asked.clear()
    assert several.ask(questions.ask, soon()) == A
    assert questions.asked == [A]


def test_the_first_source_is_asked_first_and_others_when_the_seeds_fail() -> None:
    other = Address("other", 1)
    questions = Questions()
    assert sources().ask(questions.ask, soon(), first=other) == other
    assert questions.asked == [other]
    questions.silent = {A, B, C}
    assert sources().ask(questions.ask, soon(), others=[other]) == other


def test_sources_may_fail_in_one_thread_while_another_asks() -> None:
    several, others = sources(), [Address(f"other{number}", 1) for number in range(200)]
    is_over = threading.Event()

    def doubt() -> None:
        while not is_over.is_set():
            for address in others:
                several.ask_last(address)

    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            doubting = [threads.submit(doubt) for _ in range(2)]
            try:
                for number in range(300):
                    assert several.ask(Questions().ask, soon(), others=others[: number % 200], first=A) == A
            finally:
                is_over.set()
            for doubts in doubting:
                doubts.result()
    finally:
        sys.setswitchinterval(switch_interval_s)


def test_without_an_answer_the_last_failure_is_raised() -> None:
    questions = Questions(A, B, C)
    with pytest.raises(RedisTroubleError) as caught:
        sources().ask(questions.ask, soon())
    assert caught.value.reason is MissReason.CLOSED
    assert sorted(questions.asked) == [A, B, C]


def test_no_source_is_asked_after_the_deadline() -> None:
    questions = Questions()
    with pytest.raises(RedisTroubleError) as caught:
        sources().ask(questions.ask, time.monotonic())
    assert (caught.value.reason, questions.asked) == (MissReason.TIMEOUT, [])
