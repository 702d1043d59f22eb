"""A step for the C++ code: its arrays, and refusal of everything that would lead outside of the pools."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata
from decoder_svc.runner.cpu.native_step import PoolSizes, native_step
from decoder_svc.scheduling.prompt import Span

SIZES = PoolSizes(block_size=4, num_blocks=5, num_sliding_blocks=3)
# Two new tokens behind three cached ones in blocks 3 and 1, then one new token in block 2.
FULL = BlockMetadata(torch.tensor([15, 4, 8]), (torch.tensor([3, 1]), torch.tensor([2])), (0, 0))
SLIDING = BlockMetadata(torch.tensor([3, 8, 4]), (torch.tensor([0, 2]), torch.tensor([1])), (0, 0))
METADATA = AttentionMetadata(FULL, SLIDING, (2, 1), (5, 1), ((), ()), False)

Change = Callable[[AttentionMetadata], AttentionMetadata]


def integers(address: int, length: int) -> list[int]:
    return list((ctypes.c_int64 * length).from_address(address))


def test_the_structure_points_to_the_steps_numbers() -> None:
    step = native_step(METADATA, SIZES, num_threads=3)
    struct = step.struct
    assert (struct.num_sequences, struct.num_tokens, struct.num_threads) == (2, 3, 3)
    assert integers(struct.first_tokens, 3) == [0, 2, 3]
    assert integers(struct.num_keys, 2) == [5, 1]
    full, sliding = struct.groups
    assert integers(full.slots, 3) == [15, 4, 8]
    assert integers(full.blocks, 3) == [3, 1, 2]
    assert integers(full.first_blocks, 2) == [0, 2]
    assert integers(sliding.blocks, 3) == [0, 2, 1]
    assert struct.span_starts is None, "no spans in this step"


def test_a_token_in_a_span_has_its_bounds_and_others_an_empty_span() -> None:
    metadata = replace(METADATA, mutual_spans=((Span(1, 3),), ()), is_mutual_beyond_window=True)
    struct = native_step(metadata, SIZES, num_threads=1).struct
    assert integers(struct.span_starts, 3) == [1, 0, 0]
    assert integers(struct.span_stops, 3) == [4, 0, 0]
    assert struct.is_mutual_beyond_window == 1


def test_a_model_without_a_sliding_group_has_an_empty_second_group() -> None:
    struct = native_step(replace(METADATA, sliding=None), SIZES, num_threads=1).struct
    assert struct.groups[1].slots is None


def with_full(**changes: object) -> Change:
    return lambda metadata: replace(metadata, full=replace(metadata.full, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(with_full(slot_mapping=torch.tensor([15, 4, 20])), id="a slot behind the pool"),
        pytest.param(with_full(slot_mapping=torch.tensor([15, 4, -1])), id="a negative slot"),
        pytest.param(with_full(slot_mapping=torch.tensor([15, 4])), id="fewer slots than tokens"),
        pytest.param(with_full(block_tables=(torch.tensor([3, 5]), torch.tensor([2]))), id="a block behind the pool"),
        pytest.param(with_full(block_tables=(torch.tensor([3, -1]), torch.tensor([2]))), id="a negative block"),
        pytest.param(with_full(block_tables=(torch.tensor([3]), torch.tensor([2]))), id="too few blocks for its keys"),
        pytest.param(with_full(first_keys=(5, 0)), id="no key left"),
        pytest.param(with_full(first_keys=(-1, 0)), id="a negative first key"),
        pytest.param(lambda metadata: replace(metadata, query_lens=(3, 0)), id="a sequence without a new token"),
        pytest.param(lambda metadata: replace(metadata, kv_lens=(1, 1)), id="fewer tokens than new ones"),
        pytest.param(lambda metadata: replace(metadata, mutual_spans=((Span(1, 5),), ())), id="a span behind the end"),
    ],
)
def test_indexes_outside_of_the_pools_are_refused(change: Change) -> None:
    with pytest.raises(IndexError):
        native_step(change(METADATA), SIZES, num_threads=1)


def test_a_span_whose_keys_are_gone_is_refused() -> None:
    sliding = replace(SLIDING, first_keys=(2, 0))
    metadata = replace(METADATA, sliding=sliding, mutual_spans=((Span(1, 3),), ()), is_mutual_beyond_window=True)
    with pytest.raises(IndexError, match="before the keys"):
        native_step(metadata, SIZES, num_threads=1)
    # Tokens see the part in their window alone, or the span has no new token.
    native_step(replace(metadata, is_mutual_beyond_window=False), SIZES, num_threads=1)
    native_step(replace(metadata, mutual_spans=((Span(0, 3),), ())), SIZES, num_threads=1)


def test_the_sliding_group_is_checked_against_its_own_pool() -> None:
    group = replace(SLIDING, block_tables=(torch.tensor([0, 3]), torch.tensor([1])))
    with pytest.raises(IndexError, match="pool of 3 blocks"):
        native_step(replace(METADATA, sliding=group), SIZES, num_threads=1)
