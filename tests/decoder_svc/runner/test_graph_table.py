"""Inputs of graphs: batch sizes, order of recording, a step's numbers and the padding after them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoder_svc.runner.graph_table import DecodeInputs, GraphTable, PoolShape, StepShape, graph_batch_sizes
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep

FULL, SLIDING = PoolShape(max_blocks=5, unread_block=30), PoolShape(max_blocks=3, unread_block=12)
CPU = torch.device("cpu")
SIZES = (1, 2, 4, 8)


def shape(*, has_sliding_group: bool) -> StepShape:
    return StepShape(6, torch.float32, 3, 4, FULL, SLIDING if has_sliding_group else None)


def step(num_tokens: int, width: int, seed: int, *, has_sliding_group: bool) -> DecodeInputs:
    """Returns a step whose numbers differ from all padding."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(2, 10, size, dtype=dtype, generator=generator)

    def blocks() -> PagedBlocks:
        return PagedBlocks(numbers(num_tokens, dtype=torch.int64), numbers(num_tokens, width), numbers(num_tokens))

    sliding = blocks() if has_sliding_group else None
    starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    return DecodeInputs(
        torch.randn(num_tokens, 6, generator=generator),
        numbers(3, num_tokens, dtype=torch.int64),
        PagedStep(blocks(), sliding, starts, numbers(num_tokens), None, 1, 9),
    )


def at_once(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return function


def test_sizes_hold_every_batch_and_pad_by_less_than_eight() -> None:
    assert graph_batch_sizes(1) == (1,)
    assert graph_batch_sizes(3) == (1, 2, 4)
    assert graph_batch_sizes(20) == (1, 2, 4, 8, 16, 24)
    for most in range(1, 200):
        sizes = graph_batch_sizes(most)
        assert sizes == tuple(sorted(set(sizes)))
        for num_tokens in range(1, most + 1):
            assert 0 <= next(size for size in sizes if size >= num_tokens) - num_tokens < 8


def test_the_largest_is_recorded_first() -> None:
    table = GraphTable((4, 1, 8, 2), shape(has_sliding_group=False), CPU)
    seen: list[int] = []

    def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        seen.append(len(function()))
        return function

    table.capture(lambda inputs: inputs.embeddings, record)
    assert seen == [8, 4, 2, 1]
    assert [table.size_for(number) for number in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]


@given(
    batches=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(0, 99)), min_size=1, max_size=4),
    has_sliding_group=st.booleans(),
)
def test_a_graph_reads_the_step_and_padding_after_it_regardless_of_earlier_contents(
    batches: list[tuple[int, int, int]], has_sliding_group: bool
) -> None:
    table = GraphTable(SIZES, shape(has_sliding_group=has_sliding_group), CPU)
    for num_tokens, width, seed in batches:
        inputs = step(num_tokens, width, seed, has_sliding_group=has_sliding_group)
        size = next(size for size in SIZES if size >= num_tokens)
        filled = table.fill(inputs, size)
        assert torch.equal(filled.embeddings[:num_tokens], inputs.embeddings)
        assert torch.equal(filled.positions[:, :num_tokens], inputs.positions)
        assert torch.equal(filled.step.kv_lens[:num_tokens], inputs.step.kv_lens)
        assert filled.step.kv_lens[num_tokens:].tolist() == [1] * (size - num_tokens)
        assert filled.step.query_starts.tolist() == list(range(size + 1))
        for group, of_step, pool in (
            (filled.step.full, inputs.step.full, FULL),
            (filled.step.sliding, inputs.step.sliding, SLIDING),
        ):
            assert (group is None) == (of_step is None)
            if group is None or of_step is None:
                continue
            assert torch.equal(group.slot_mapping[:num_tokens], of_step.slot_mapping)
            assert torch.equal(group.block_table[:num_tokens, :width], of_step.block_table)
            assert torch.equal(group.first_keys[:num_tokens], of_step.first_keys)
            # Padding reads and writes only the block that nobody else reads.
            assert set(group.slot_mapping[num_tokens:].tolist()) <= {pool.unread_block * 4}
            assert set(group.block_table[num_tokens:].flatten().tolist()) <= {pool.unread_block}
            assert set(group.first_keys[num_tokens:].tolist()) <= {0}


def test_a_replay_gives_the_rows_of_the_step_alone() -> None:
    table = GraphTable(SIZES, shape(has_sliding_group=True), CPU)
    table.capture(lambda inputs: inputs.embeddings * 2, at_once)
    inputs = step(3, 2, 0, has_sliding_group=True)
    assert torch.equal(table.replay(inputs, 4), inputs.embeddings * 2)


def test_memory_stays_where_it_was_recorded() -> None:
    table = GraphTable(SIZES, shape(has_sliding_group=True), CPU)
    addresses = {table.fill(step(3, 2, seed, has_sliding_group=True), 4).embeddings.data_ptr() for seed in range(3)}
    assert len(addresses) == 1


def test_a_step_wider_than_the_tables_is_refused() -> None:
    table = GraphTable(SIZES, shape(has_sliding_group=False), CPU)
    with pytest.raises(RuntimeError):
        table.fill(step(2, 6, 0, has_sliding_group=False), 2)
