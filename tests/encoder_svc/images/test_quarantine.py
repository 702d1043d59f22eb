"""Two strikes put an image into quarantine for a while; the table is bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from encoder_svc.images import quarantine as quarantine_module
from encoder_svc.images.quarantine import Quarantine, Stage
from encoder_svc.metrics import EncoderMetrics
from lookonce.errors import ImagePoisonousError
from tests.clock import Clock

DURATION_S = 60.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def quarantine(clock: Clock, registry: CollectorRegistry) -> Quarantine:
    return Quarantine(Stage.FORWARD, EncoderMetrics(registry), duration_s=DURATION_S, clock=clock)


@pytest.fixture
def is_held(quarantine: Quarantine) -> Callable[[bytes], bool]:
    def ask(key: bytes) -> bool:
        try:
            quarantine.check(key)
        except ImagePoisonousError:
            return True
        return False

    return ask


def test_an_image_is_held_after_two_strikes_and_no_other_one(
    quarantine: Quarantine, is_held: Callable[[bytes], bool], registry: CollectorRegistry
) -> None:
    assert not is_held(b"bad")
    quarantine.strike(b"bad")
    quarantine.strike(b"other")
    assert not is_held(b"bad")
    quarantine.strike(b"bad")
    assert is_held(b"bad")
    assert not is_held(b"other")
    labels = {"stage": "forward"}
    assert registry.get_sample_value("lookonce_encoder_poisonous_total", labels) == 3
    assert registry.get_sample_value("lookonce_encoder_quarantine_refused_total", labels) == 1


def test_strikes_are_forgotten_after_a_while(
    quarantine: Quarantine, is_held: Callable[[bytes], bool], clock: Clock
) -> None:
    quarantine.strike(b"bad")
    clock.now_s += DURATION_S
    quarantine.strike(b"bad")
    clock.now_s += DURATION_S
    assert is_held(b"bad")
    clock.now_s += 1
    assert not is_held(b"bad")
    quarantine.strike(b"bad")
    assert not is_held(b"bad"), "it begins anew"


def test_an_image_that_succeeds_has_no_strikes(quarantine: Quarantine, is_held: Callable[[bytes], bool]) -> None:
    quarantine.strike(b"unlucky")
    quarantine.absolve(b"unlucky")
    quarantine.absolve(b"unknown")
    quarantine.strike(b"unlucky")
    assert not is_held(b"unlucky")


def test_the_table_is_bounded_and_keeps_the_latest_failures(
    quarantine: Quarantine, is_held: Callable[[bytes], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine_module, "_MAX_REMEMBERED", 3)
    for key in (b"0", b"1", b"2", b"0", b"3"):
        quarantine.strike(key)
        quarantine.strike(key)
    assert [is_held(key) for key in (b"0", b"1", b"2", b"3")] == [True, False, True, True]
