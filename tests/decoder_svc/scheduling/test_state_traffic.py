"""Arbitrary traffic against a model with recurrent layers: every chunk continues the state of its own context."""

from __future__ import annotations

import functools
import itertools

import pytest

from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager, PrefixHit
from decoder_svc.scheduling.kv_cache.state_group import StateGroupSize
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.scheduling.traffic import MAX_NUM_SEQS, Traffic

NUM_SEEDS = 60
# By the number of snapshots and the blocks between two of them.
DRAFTS = SpeculationLimits(3)
# The windows of layers beside recurrent ones.
WINDOWS = [Window(5), Window(5, is_chunked=True)]
SIZES = [(1, 1), (3, 1), (4, 2), (20, 1), (20, 3)]


@functools.cache
def traffic_of(
    seed: int,
    num_snapshots: int,
    interval: int,
    *,
    deterministic: bool = False,
    overlaps: bool = False,
    speculation: SpeculationLimits = NO_SPECULATION,
    num_draft_states: int = 0,
    window: Window | None = None,
) -> Traffic:
    """Runs traffic once; it checks itself meanwhile."""
    traffic = Traffic(
        seed,
        deterministic=deterministic,
        overlaps=overlaps,
        speculation=speculation,
        window=window,
        states=StateGroupSize(MAX_NUM_SEQS, num_snapshots, interval, num_draft_states),
    )
    traffic.run(120)
    return traffic


@pytest.mark.parametrize(("num_snapshots", "interval"), SIZES)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_chunk_continues_another_state(seed: int, num_snapshots: int, interval: int) -> None:
    traffic_of(seed, num_snapshots, interval)


@pytest.mark.parametrize(("num_snapshots", "interval"), SIZES)
@pytest.mark.parametrize("seed", range(NUM_SEEDS // 4))
def test_nor_in_deterministic_mode(seed: int, num_snapshots: int, interval: int) -> None:
    traffic_of(seed, num_snapshots, interval, deterministic=True)


@pytest.mark.parametrize(("num_snapshots", "interval"), SIZES)
@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_nor_where_steps_may_overlap(seed: int, num_snapshots: int, interval: int) -> None:
    traffic_of(seed, num_snapshots, interval, overlaps=True)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("num_snapshots", "interval"), SIZES)
@pytest.mark.parametrize("seed", range(NUM_SEEDS // 4))
def test_nor_beside_layers_with_a_window(seed: int, num_snapshots: int, interval: int, window: Window) -> None:
    traffic_of(seed, num_snapshots, interval, window=window)
    drafts = num_snapshots
    traffic_of(seed, num_snapshots, interval, speculation=DRAFTS, num_draft_states=drafts, window=window)


def test_traffic_with_both_kinds_of_layers_is_worth_testing_with() -> None:
    """Hits that end in front of the last snapshot, because layers with a window have lost blocks of it."""
    hits = shorter = 0
    find = KVCacheManager._find_from

    def compared(self: KVCacheManager, request: Request, index: int) -> PrefixHit:
        nonlocal hits, shorter
        hit = find(self, request, index)
        sliding, self._sliding = self._sliding, None
        without = find(self, request, index)
        self._sliding = sliding
        hits += hit.num_tokens > 0
        shorter += 0 < hit.num_tokens < without.num_tokens
        return hit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheManager, "_find_from", compared)
        for seed in range(NUM_SEEDS):
            traffic_of.__wrapped__(seed, 20, 1, window=WINDOWS[seed % 2])
    assert min(hits // 10, shorter) >= 4, (hits, shorter)


# One draft in a step, some, and as many as all requests can have.
@pytest.mark.parametrize("num_draft_states", [1, 4, 3 * MAX_NUM_SEQS])
@pytest.mark.parametrize(("num_snapshots", "interval"), SIZES)
@pytest.mark.parametrize("seed", range(NUM_SEEDS // 4))
@pytest.mark.parametrize("overlaps", [False, True])
def test_nor_with_drafts(seed: int, num_snapshots: int, interval: int, num_draft_states: int, overlaps: bool) -> None:
    traffic_of(seed, num_snapshots, interval, overlaps=overlaps, speculation=DRAFTS, num_draft_states=num_draft_states)


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 4))
def test_without_states_for_them_there_are_no_drafts(seed: int) -> None:
    traffic = traffic_of(seed, 4, 1, speculation=DRAFTS)
    assert traffic.target.speculation.num_drafted == 0


def test_traffic_with_drafts_is_worth_testing_with() -> None:
    drafted = accepted = rejected = 0
    for seed in range(NUM_SEEDS // 4):
        speculation = traffic_of(seed, 20, 1, speculation=DRAFTS, num_draft_states=4).target.speculation
        drafted += speculation.num_drafted
        accepted += speculation.num_accepted
        rejected += speculation.num_drafted - speculation.num_accepted
    assert min(drafted, accepted, rejected) >= 20, (drafted, accepted, rejected)


def test_traffic_with_states_is_worth_testing_with() -> None:
    hits = preemptions = loaded = adopted = taken = 0
    for seed, size in itertools.product(range(NUM_SEEDS), SIZES):
        traffic = traffic_of(seed, *size)
        assert traffic.oracle.states is not None
        loaded += traffic.oracle.states.num_loaded
        hits += sum(one.usage.cached_prompt_tokens > 0 for one in traffic.requests)
        preemptions += sum(one.num_preemptions > 0 for one in traffic.requests)
        for output in traffic.trace:
            new = {one.request_id for one in output.admitted}
            uses = [(chunk.request_id in new, chunk.states) for chunk in output.chunks if chunk.states is not None]
            adopted += sum(use.loaded is not None and not is_new for is_new, use in uses)
            taken += sum(len(use.taken) for _, use in uses)
    counts = (hits, preemptions, loaded, adopted, taken // 3)
    assert min(counts) >= 8, counts
