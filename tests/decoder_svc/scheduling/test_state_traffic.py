"""Arbitrary traffic against a model with recurrent layers: every chunk continues the state of its own context."""

from __future__ import annotations

import functools
import itertools

import pytest

from decoder_svc.scheduling.kv_cache.state_group import StateGroupSize
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
from tests.decoder_svc.scheduling.traffic import MAX_NUM_SEQS, Traffic

NUM_SEEDS = 60
# By the number of snapshots and the blocks between two of them.
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
) -> Traffic:
    """Runs traffic once; it checks itself meanwhile."""
    traffic = Traffic(
        seed,
        deterministic=deterministic,
        overlaps=overlaps,
        speculation=speculation,
        states=StateGroupSize(MAX_NUM_SEQS, num_snapshots, interval),
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


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_no_draft_enters_a_state(seed: int) -> None:
    """Drafts are asked for, and none is made: a rejected one could not be taken back."""
    traffic = traffic_of(seed, 4, 1, speculation=SpeculationLimits(3))
    assert traffic.target.speculation.num_drafted == 0


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
