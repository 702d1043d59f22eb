"""The ranks tell each other where they are through their connections to rank 0."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import pytest

from decoder_svc.runner.parallel.meeting_store import MeetingStore, RemoteStore

TIMEOUT_S = 30


def test_what_one_rank_tells_all_others_hear() -> None:
    ours, theirs = zip(*(Pipe() for _ in range(3)), strict=True)
    store = MeetingStore()
    threads = store.answer(ours)
    others = [RemoteStore(one) for one in theirs]
    others[0].set("a", b"\x00\xff")
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(one.get, "b") for one in others[1:]]
        assert others[0].get("a") == store.get("a") == b"\x00\xff"
        assert not any(call.done() for call in waiting), "nobody has told it"
        store.set("b", "from rank 0")
        assert [call.result(TIMEOUT_S) for call in waiting] == [b"from rank 0"] * 2
    for one in others:
        one.wait(["a", "b"])
        one.leave()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    store = MeetingStore()
    threads = store.answer(ours)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "a")
        theirs[0].close()
        with pytest.raises(RuntimeError, match="a rank of the split model has ended"):
            waiting.result(TIMEOUT_S)
    with pytest.raises(RuntimeError):
        store.wait(["b"])
    # The other one asks for what never comes: rank 0 answers no more, and ends.
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(RemoteStore(theirs[1]).get, "a")
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)
        for one in ours:
            one.close()
        with pytest.raises((EOFError, OSError)):
            asking.result(TIMEOUT_S)


def test_threads_of_the_engine_ask_nobody_once_the_ranks_have_met() -> None:
    """NCCL has such threads. Rank 0 says what is to be computed by then."""
    ours, theirs = Pipe()
    store, other = MeetingStore(), RemoteStore(theirs)
    threads = store.answer([ours])
    other.leave()
    for thread in threads:
        thread.join(TIMEOUT_S)
    for call in (lambda: other.set("a", b""), lambda: other.get("a"), lambda: other.wait(["a"])):
        with pytest.raises(RuntimeError, match="the ranks have met"):
            call()
    assert not ours.poll()
