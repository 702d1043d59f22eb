"""Tokens of answers that need neither blocks nor rows are scheduled on a shorter way, with the same decisions."""

from __future__ import annotations

import pytest

from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SchedulerOutput
from decoder_svc.scheduling.speculation import SpeculationLimits
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.traffic import MODES, Traffic

NUM_ACTIONS = 300


def decisions(traffic: Traffic) -> list[SchedulerOutput]:
    """Runs random traffic, which checks itself, and returns everything that was decided."""
    traffic.run(NUM_ACTIONS)
    return traffic.trace


# Drafts are offered neither with deterministic answers nor with steps that overlap.
WITHOUT_DRAFTS = [(*mode, overlaps, 0) for mode in MODES for overlaps in (False, True)]
WITH_DRAFTS = [(mask, False, False, 3) for mask in Mask]


@pytest.mark.parametrize(("mask", "deterministic", "overlaps", "drafts"), WITHOUT_DRAFTS + WITH_DRAFTS)
@pytest.mark.parametrize("seed", range(6))
def test_the_shorter_way_decides_the_same(
    seed: int, mask: Mask, deterministic: bool, overlaps: bool, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SpeculationLimits(drafts, 1, 3)
    num_short = 0
    schedule = Scheduler._schedule_answer_token

    def counting(*arguments: object) -> None:
        nonlocal num_short
        num_short += 1
        schedule(*arguments)  # type: ignore[arg-type]

    def traffic() -> Traffic:
        return Traffic(seed, mask=mask, deterministic=deterministic, overlaps=overlaps, speculation=limits)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_schedule_answer_token", counting)
        by_shorter_way = decisions(traffic())
    assert num_short > 5, "hardly any token takes the shorter way"
    monkeypatch.setattr(KVCacheManager, "has_slot_for_answer", lambda *_: False)
    assert decisions(traffic()) == by_shorter_way
