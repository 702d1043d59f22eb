"""Faults in what the scheduler does while a step is in flight: traffic whose steps overlap must notice each of them."""

from __future__ import annotations

import pytest

from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import ScheduledChunk, SchedulerOutput
from decoder_svc.scheduling.step_results import StepResults
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.mutation import NUM_SEEDS, Mutations, Patch
from tests.decoder_svc.scheduling.traffic import Traffic

mutation = Mutations()


@mutation
def results_of_the_step_behind_a_failed_one_are_kept(patch: Patch) -> None:
    original = Scheduler.fail_step

    def fail_step(self: Scheduler, output: SchedulerOutput, behind: SchedulerOutput | None = None) -> list[Request]:
        failed = original(self, output)
        if behind is not None:
            self.advance(behind)
            self._in_flight = None
        return failed

    patch.setattr(Scheduler, "fail_step", fail_step)


@mutation
def blocks_of_a_step_in_flight_count_as_computed(patch: Patch) -> None:
    original = KVCacheManager.begin_step

    def begin_step(self: KVCacheManager) -> None:
        for group in self._groups:
            group.unproven.clear()
        original(self)

    patch.setattr(KVCacheManager, "begin_step", begin_step)


@mutation
def a_request_that_certainly_ends_is_computed(patch: Patch) -> None:
    def may_grow(self: Request, max_context_tokens: int) -> bool:
        return self.num_output_tokens < self.params.max_tokens

    patch.setattr(Request, "may_grow", may_grow)


@mutation
def the_token_that_is_in_flight_is_forgotten(patch: Patch) -> None:
    original = StepResults.advance

    def advance(self: StepResults, request: Request, chunk: ScheduledChunk) -> None:
        original(self, request, chunk)
        request.num_computed_tokens -= chunk.samples and chunk.num_tokens == 1

    patch.setattr(StepResults, "advance", advance)


@mutation
def a_chunk_behind_a_corrected_token_is_valid(patch: Patch) -> None:
    original = Scheduler.advance

    def advance(self: Scheduler, output: SchedulerOutput) -> None:
        self._void.clear()
        original(self, output)

    patch.setattr(Scheduler, "advance", advance)


def run_all_seeds() -> None:
    for seed in range(NUM_SEEDS):
        for mask in Mask:
            Traffic(seed, mask=mask, overlaps=True).run(120)


def test_nothing_is_noticed_where_nothing_is_wrong() -> None:
    run_all_seeds()


@pytest.mark.parametrize("name", sorted(mutation))
def test_traffic_that_overlaps_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation[name](monkeypatch)
    with pytest.raises(AssertionError):
        run_all_seeds()
