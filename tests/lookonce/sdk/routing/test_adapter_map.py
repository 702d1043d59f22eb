"""A client remembers the adapters of replicas, and forgets what is old."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lookonce.sdk.routing import adapter_map
from lookonce.sdk.routing.adapter_map import AdapterMap


def test_a_refusal_holds_until_it_is_old_or_the_replica_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    known = AdapterMap()
    ways: list[Callable[[], None]] = [
        lambda: known.replace("a", ["forms"]),
        lambda: known.note_served("a", "forms"),
    ]
    for learn in ways:
        known.note_refused("a", "forms")
        assert known.has_refused("a", "forms")
        assert not known.has_refused("b", "forms")
        assert not known.served("a")
        learn()
        assert not known.has_refused("a", "forms")
        assert known.served("a") == {"forms"}
    known.note_refused("a", "forms")
    monkeypatch.setattr(adapter_map, "_REFUSAL_AGE_S", 0.0)
    assert not known.has_refused("a", "forms")


def test_a_replica_that_has_gone_is_forgotten() -> None:
    known = AdapterMap()
    known.replace("a", ["forms"])
    for address in ("a", "b"):
        known.note_refused(address, "bills")
    known.forget("a")
    assert not known.served("a")
    assert not known.has_refused("a", "bills")
    assert known.has_refused("b", "bills")


def test_names_from_requests_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_map, "_MAX_REFUSALS", 10)
    known = AdapterMap()
    for number in range(100):
        known.note_refused("a", f"name {number}")
    assert len(known._refusals) <= 10
    assert known.has_refused("a", "name 99")
