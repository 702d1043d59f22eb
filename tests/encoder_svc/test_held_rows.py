"""Streams that nobody reads hold a bounded size of rows, and streams of one buffer hold it once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from encoder_svc.held_rows import HeldRows
from lookonce.errors import OverloadedError


def test_each_copy_counts_and_a_tenant_gets_as_much_as_is_free() -> None:
    held = HeldRows(100)
    with held.held("a", memoryview(bytearray(50))):
        with pytest.raises(OverloadedError), held.held("a", memoryview(bytearray(1))):
            pass
        with held.held("b", memoryview(bytearray(25))):
            assert held.num_bytes == 75
    assert held.num_bytes == 0


def test_streams_of_one_buffer_hold_all_of_it_once_until_the_last_one_ends() -> None:
    held, rows = HeldRows(100), memoryview(bytearray(40))
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(held.held("a", rows[:10]))
        second.enter_context(held.held("a", rows[20:].toreadonly()))
        assert held.num_bytes == 40
        first.close()
        assert held.num_bytes == 40
    assert held.num_bytes == 0
    assert not held._buffers


def test_a_buffer_counts_for_each_tenant_that_holds_it() -> None:
    held, rows = HeldRows(100), memoryview(bytearray(30))
    with held.held("a", rows), held.held("b", rows):
        assert held.num_bytes == 60


def test_copies_in_answers_count_each_until_they_are_given_back_or_their_call_ends() -> None:
    held = HeldRows(100)
    with held.copies("a") as copies:
        copies.take(20)
        copies.take(20)
        copies.take(10)
        with pytest.raises(OverloadedError):
            copies.take(1)
        assert held.num_bytes == 50
        copies.give_back(20)
        assert held.num_bytes == 30
    assert held.num_bytes == 0
