"""Arbitrary traffic against the invariants of the scheduler, checked after every step."""

from __future__ import annotations

import functools

import pytest

from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.speculation import SpeculationLimits
from decoder_svc.scheduling.window import Window
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.traffic import MODES, Traffic

# The tests of `worth` look at the traffic of the seeds that the other tests have run.
NUM_SEEDS = 24


@functools.cache
def traffic_of(seed: int, mask: Mask, window: Window | None = None, *, deterministic: bool = False) -> Traffic:
    """Runs traffic once; it checks itself meanwhile."""
    traffic = Traffic(seed, mask=mask, window=window, deterministic=deterministic)
    traffic.run(120)
    return traffic


@pytest.mark.parametrize(("mask", "deterministic"), MODES)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_token_is_computed_from_another_context(seed: int, mask: Mask, deterministic: bool) -> None:
    traffic_of(seed, mask, deterministic=deterministic)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("size", [1, 4, 5, 6])
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_no_layer_with_a_window_reads_freed_blocks(seed: int, mask: Mask, size: int, is_chunked: bool) -> None:
    traffic_of(seed, mask, Window(size, is_chunked))


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_nor_in_deterministic_mode(seed: int) -> None:
    for is_chunked in (False, True):
        traffic_of(seed, Mask.CAUSAL, Window(5, is_chunked), deterministic=True)


@pytest.mark.parametrize("mask", list(Mask))
def test_traffic_is_worth_testing_with(mask: Mask) -> None:
    """Without hits, preemptions and adoptions the test above would show nothing."""
    hits = preemptions = shared = 0
    for seed in range(NUM_SEEDS):
        traffic = traffic_of(seed, mask)
        hits += sum(one.usage.cached_prompt_tokens > 0 for one in traffic.requests)
        preemptions += sum(one.num_preemptions > 0 for one in traffic.requests)
        shared += sum(chunk.write_start > chunk.start for output in traffic.trace for chunk in output.chunks)
    assert min(hits, preemptions, shared) >= 8, (hits, preemptions, shared)


@pytest.mark.parametrize(
    ("mask", "window"), [*((mask, Window(5)) for mask in Mask), (Mask.CAUSAL, Window(5, is_chunked=True))]
)
def test_traffic_with_a_window_is_worth_testing_with(mask: Mask, window: Window) -> None:
    hits = waits_for_sliding = let_go = 0
    for seed in range(NUM_SEEDS // 2):
        traffic = traffic_of(seed, mask, window)
        hits += sum(one.usage.cached_prompt_tokens > 0 for one in traffic.requests)
        let_go += sum(chunk.sliding.first > 0 for output in traffic.trace for chunk in output.chunks if chunk.sliding)
        waits_for_sliding += traffic.num_short_of_sliding_blocks
    assert min(hits, let_go, waits_for_sliding) >= 3, (hits, let_go, waits_for_sliding)


def test_equal_traffic_gets_equal_decisions() -> None:
    first, second = Traffic(5), Traffic(5)
    first.run(150)
    second.run(150)
    assert first.trace == second.trace


def test_hits_end_inside_images_whose_tokens_see_each_other() -> None:
    """The rest of such an image is computed in one chunk."""
    inside = 0
    for seed in range(NUM_SEEDS):
        traffic = traffic_of(seed, Mask.IMAGE)
        chunks = [chunk for output in traffic.trace for chunk in output.chunks]
        spans = {one.request_id: one.prompt.mutual_spans for one in traffic.requests}
        inside += sum(span.offset < chunk.start < span.stop for chunk in chunks for span in spans[chunk.request_id])
    assert inside >= 8, inside


SHORT_DRAFTS = SpeculationLimits(3)


@pytest.mark.parametrize("window", [None, Window(1), Window(5), Window(5, is_chunked=True)])
@pytest.mark.parametrize(("mask", "deterministic"), MODES)
@pytest.mark.parametrize("seed", range(40))
def test_steps_that_overlap_compute_the_same_tokens(
    seed: int, mask: Mask, deterministic: bool, window: Window | None
) -> None:
    Traffic(seed, mask=mask, deterministic=deterministic, window=window, overlaps=True).run(120)


@pytest.mark.parametrize("seed", range(60))
def test_steps_with_drafts_do_not_overlap_and_others_do(seed: int) -> None:
    Traffic(seed, speculation=SHORT_DRAFTS, overlaps=True).run(120)


@pytest.mark.parametrize("mask", list(Mask))
def test_traffic_that_overlaps_is_worth_testing_with(mask: Mask) -> None:
    ahead = wasted = corrected = stopped = preemptions = 0
    for seed in range(40):
        traffic = Traffic(seed, mask=mask, overlaps=True)
        traffic.run(120)
        ahead += traffic.num_ahead
        wasted += traffic.num_wasted
        corrected += traffic.num_corrected
        stopped += sum(one.finish_reason is FinishReason.STOP for one in traffic.requests)
        preemptions += sum(one.num_preemptions > 0 for one in traffic.requests)
    counts = (ahead, wasted, corrected, stopped, preemptions)
    assert min(counts) >= 15, counts
