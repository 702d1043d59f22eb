"""Inputs of graphs: batch sizes, order of recording, a step's numbers and the padding after them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.runner.graphs.decode_table import Decoded, DecodeInputs, GraphTable, StepShape, graph_batch_sizes
from decoder_svc.runner.graphs.inputs import PoolShape
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.input_batch import BlockInputs, FlatInputs
from decoder_svc.scheduling.request import RequestId

FULL, SLIDING = PoolShape(max_blocks=50, unread_block=300), PoolShape(max_blocks=30, unread_block=120)
CPU = torch.device("cpu")
SIZES = (1, 2, 4, 8)


def table_of(sizes: tuple[int, ...] = SIZES, *, has_sliding_group: bool = True) -> GraphTable:
    shape = StepShape(3, 4, FULL, SLIDING if has_sliding_group else None)
    return GraphTable(sizes, shape, HostTransfer(CPU))


def nothing_to_feed(token_ids: torch.Tensor) -> None:
    """The host knows the ids of all tokens."""


def step(num_tokens: int, width: int, seed: int, *, has_sliding_group: bool) -> FlatInputs:
    """Returns a step whose numbers differ from all padding. Few seeds share many entries of their block tables."""
    draw = np.random.default_rng(seed)

    def numbers(*size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return draw.integers(2, 10, size)

    def blocks() -> BlockInputs:
        tables = [numbers(width if row == 0 else int(draw.integers(1, width + 1))) for row in range(num_tokens)]
        return BlockInputs(numbers(num_tokens), tuple(tables), tuple(numbers(num_tokens).tolist()))

    return FlatInputs(
        token_ids=numbers(num_tokens),
        positions=numbers(3, num_tokens),
        full=blocks(),
        sliding=blocks() if has_sliding_group else None,
        query_lens=(1,) * num_tokens,
        kv_lens=tuple(numbers(num_tokens).tolist()),
        mutual_spans=((),) * num_tokens,
        sampled_ids=tuple(RequestId(str(index)) for index in range(num_tokens)),
        sampled_indexes=np.arange(num_tokens),
    )


def at_once(function: Callable[[], Decoded]) -> Callable[[], Decoded]:
    return function


def doubled(inputs: DecodeInputs) -> Decoded:
    """Stands for a model's pass."""
    for change in inputs.changes:
        change.apply()
    return Decoded(inputs.token_ids[:, None] * 2, inputs.token_ids * 3)


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
    table = table_of((4, 1, 8, 2), has_sliding_group=False)
    seen: list[int] = []

    def record(function: Callable[[], Decoded]) -> Callable[[], Decoded]:
        seen.append(len(function().logits))
        return function

    table.capture(doubled, record)
    assert seen == [8, 4, 2, 1]
    assert [table.size_for(number) for number in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]


@given(
    batches=st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from((1, 3, 30)), st.integers(0, 3)), min_size=1, max_size=5
    ),
    has_sliding_group=st.booleans(),
)
def test_a_graph_reads_the_step_and_padding_after_it_regardless_of_earlier_contents(
    batches: list[tuple[int, int, int]], has_sliding_group: bool
) -> None:
    table = table_of(has_sliding_group=has_sliding_group)
    for num_tokens, width, seed in batches:
        inputs = step(num_tokens, width, seed, has_sliding_group=has_sliding_group)
        size = next(size for size in SIZES if size >= num_tokens)
        filled = table.fill(inputs, size)
        doubled(filled)
        num_padding = size - num_tokens
        assert filled.token_ids.tolist() == [*inputs.token_ids.tolist(), *[0] * num_padding]
        assert filled.positions.tolist() == [[*axis, *[0] * num_padding] for axis in inputs.positions.tolist()]
        assert filled.step.kv_lens.tolist() == [*inputs.kv_lens, *[1] * num_padding]
        assert filled.step.query_starts.tolist() == list(range(size + 1))
        for group, of_step, pool in (
            (filled.step.full, inputs.full, FULL),
            (filled.step.sliding, inputs.sliding, SLIDING),
        ):
            assert (group is None) == (of_step is None)
            if group is None or of_step is None:
                continue
            # Padding reads and writes only the block that nobody else reads.
            assert group.slot_mapping.tolist() == [
                *of_step.slot_mapping.tolist(),
                *[pool.unread_block * 4] * num_padding,
            ]
            assert group.first_keys.tolist() == [*of_step.first_tokens, *[0] * num_padding]
            assert group.block_table.shape == (size, pool.max_blocks)
            for row, blocks in zip(group.block_table.tolist(), of_step.block_tables, strict=False):
                assert row[: len(blocks)] == blocks.tolist()
            assert set(group.block_table[num_tokens:, 0].tolist()) <= {pool.unread_block}


def test_a_step_brings_only_the_entries_of_block_tables_that_changed() -> None:
    table = table_of(has_sliding_group=False)
    inputs = step(3, 4, 0, has_sliding_group=False)
    doubled(table.fill(inputs, 4))
    (changes,) = table.fill(inputs, 4).changes
    unread = len(changes.entries) - 1
    assert set(changes.places.tolist()) == {unread}
    inputs.full.block_tables[2][0] = 77
    (changes,) = table.fill(inputs, 4).changes
    assert [
        (place, block)
        for place, block in zip(changes.places.tolist(), changes.blocks.tolist(), strict=True)
        if place != unread
    ] == [(2 * FULL.max_blocks, 77)]


def test_a_replay_gives_the_rows_of_the_step_alone() -> None:
    table = table_of()
    table.capture(doubled, at_once)
    inputs = step(3, 2, 0, has_sliding_group=True)
    decoded = table.replay(inputs, 4, nothing_to_feed)
    assert decoded.logits[:, 0].tolist() == [2 * each for each in inputs.token_ids]
    assert decoded.likeliest.tolist() == [3 * each for each in inputs.token_ids]


def test_memory_stays_where_it_was_recorded() -> None:
    table = table_of()
    filled = [table.fill(step(3, 30, seed, has_sliding_group=True), 4) for seed in range(3)]
    assert len({each.token_ids.data_ptr() for each in filled}) == 1
    assert len({each.step.full.block_table.data_ptr() for each in filled}) == 1


def test_a_step_wider_than_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="51 blocks"):
        table_of(has_sliding_group=False).fill(step(2, 51, 0, has_sliding_group=False), 2)
