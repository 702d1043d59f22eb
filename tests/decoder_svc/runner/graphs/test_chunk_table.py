"""Inputs of graphs of steps with prompt chunks: sizes, a step's numbers, and the padding after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoder_svc.runner.graphs.chunk_table import ChunkGraphTable, ChunkInputs, ChunkShape, chunk_graph_sizes
from decoder_svc.runner.graphs.decode_table import Decoded, StepShape
from decoder_svc.runner.graphs.inputs import BlockTable, PoolShape
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.input_batch import BlockInputs, FlatInputs
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.request import RequestId
from tests.decoder_svc.runner.graphs.test_decode_table import nothing_to_feed

BLOCK_SIZE, NUM_SEQUENCES, ROW_ELEMENTS = 4, 5, 6
FULL, SLIDING = PoolShape(max_blocks=50, unread_block=300), PoolShape(max_blocks=30, unread_block=120)
SIZES = (8, 16, 40)


def table_of(
    *, has_sliding_group: bool = True, is_mutual_beyond_window: bool | None = None, full: PoolShape = FULL
) -> ChunkGraphTable:
    transfer = HostTransfer(torch.device("cpu"))
    shape = StepShape(3, BLOCK_SIZE, full, SLIDING if has_sliding_group else None)
    tables = [BlockTable(NUM_SEQUENCES + 1, pool, transfer) for pool in shape.pools]
    return ChunkGraphTable(
        SIZES, shape, ChunkShape(ROW_ELEMENTS, torch.float32, is_mutual_beyond_window), tables, transfer
    )


def step(lengths: list[int], seed: int = 0, *, has_sliding_group: bool = True) -> FlatInputs:
    """Returns a step whose numbers differ from all padding. The last token of each sequence is sampled."""
    draw = np.random.default_rng(seed)
    num_tokens = sum(lengths)
    kv_lens = [length + int(draw.integers(0, 20)) for length in lengths]

    def numbers(*size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return draw.integers(2, 10, size)

    def blocks() -> BlockInputs:
        tables = tuple(numbers(-(-kv_len // BLOCK_SIZE)) for kv_len in kv_lens)
        return BlockInputs(numbers(num_tokens), tables, tuple(numbers(len(lengths)).tolist()))

    return FlatInputs(
        token_ids=numbers(num_tokens),
        positions=numbers(3, num_tokens),
        full=blocks(),
        sliding=blocks() if has_sliding_group else None,
        query_lens=tuple(lengths),
        kv_lens=tuple(kv_lens),
        mutual_spans=((),) * len(lengths),
        sampled_ids=tuple(RequestId(str(index)) for index in range(len(lengths))),
        sampled_indexes=np.cumsum(lengths) - 1,
    )


LENGTHS = st.lists(st.integers(1, 8), min_size=1, max_size=NUM_SEQUENCES)


def test_sizes_pad_little_and_end_at_2048_or_at_the_largest_step() -> None:
    sizes = chunk_graph_sizes(8192)
    assert sizes[:13] == (16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
    assert sizes[13:] == tuple(range(640, 2049, 128))
    assert chunk_graph_sizes(2048) == sizes
    for num_tokens in range(1, 2049):
        padding = next(size for size in sizes if size >= num_tokens) - num_tokens
        assert padding < max(32, num_tokens / 4)
    assert chunk_graph_sizes(100)[-1] == 128
    assert chunk_graph_sizes(8) == (16,)


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(LENGTHS, st.integers(0, 3)), min_size=1, max_size=3), has_sliding_group=st.booleans())
def test_a_graph_reads_the_step_and_padding_after_it_regardless_of_earlier_contents(
    steps: list[tuple[list[int], int]], has_sliding_group: bool
) -> None:
    table = table_of(has_sliding_group=has_sliding_group)
    for lengths, seed in steps:
        flat = step(lengths, seed, has_sliding_group=has_sliding_group)
        size = table.size_for(flat)
        assert size is not None
        filled = table.fill(flat, size, row_indexes=[sum(lengths) - 1])
        for change in filled.changes:
            change.apply()
        check_filled(filled, flat, size)


def check_filled(filled: ChunkInputs, flat: FlatInputs, size: int) -> None:
    num_tokens, num_sequences = len(flat.token_ids), len(flat.query_lens)
    num_padding, num_empty = size - num_tokens, NUM_SEQUENCES - num_sequences
    assert filled.token_ids.tolist() == [*flat.token_ids, *[0] * num_padding]
    assert filled.positions.tolist() == [[*axis, *[0] * num_padding] for axis in flat.positions.tolist()]
    assert filled.has_row.nonzero()[:, 0].tolist() == [num_tokens - 1]
    assert filled.rows.shape == (size, ROW_ELEMENTS)
    num_sampled = min(size, NUM_SEQUENCES)
    assert filled.sampled_indexes.tolist() == [*flat.sampled_indexes, *[0] * (num_sampled - num_sequences)]
    lengths = filled.step.query_starts.diff().tolist()
    assert lengths == [*flat.query_lens, *[0] * num_empty, num_padding]
    assert filled.step.kv_lens.tolist() == [*flat.kv_lens, *[0] * num_empty, num_padding]
    assert filled.step.max_query_len == size
    for group, of_step, pool in ((filled.step.full, flat.full, FULL), (filled.step.sliding, flat.sliding, SLIDING)):
        assert (group is None) == (of_step is None)
        if group is None or of_step is None:
            continue
        # Padding reads and writes only the block that nobody else reads.
        assert group.slot_mapping.tolist()[:num_tokens] == of_step.slot_mapping.tolist()
        assert {slot // BLOCK_SIZE for slot in group.slot_mapping.tolist()[num_tokens:]} <= {pool.unread_block}
        assert set(group.block_table[NUM_SEQUENCES].tolist()) == {pool.unread_block}
        assert group.first_keys.tolist() == [*of_step.first_tokens, *[0] * (num_empty + 1)]
        for row, blocks in zip(group.block_table.tolist(), of_step.block_tables, strict=False):
            assert row[: len(blocks)] == blocks.tolist()


@pytest.mark.parametrize("is_beyond_window", [True, False])
def test_tokens_of_a_span_see_each_other_and_padding_sees_itself(is_beyond_window: bool) -> None:
    flat = replace(step([3, 4]), kv_lens=(9, 4), mutual_spans=((Span(5, 3),), ()))
    mutual = table_of(is_mutual_beyond_window=is_beyond_window).fill(flat, 8).step.mutual
    assert mutual is not None
    assert mutual.starts.tolist() == [5, 5, 8, 0, 1, 2, 3, 0]
    assert mutual.stops.tolist() == [8, 8, 9, 1, 2, 3, 4, 1]
    assert mutual.is_beyond_window == is_beyond_window
    assert table_of().fill(flat, 8).step.mutual is None


def test_steps_that_no_graph_holds() -> None:
    table = table_of()
    assert [table.size_for(step([length])) for length in (1, 8, 9, 40, 41)] == [8, 8, 16, 40, None]
    assert table.size_for(step([1] * NUM_SEQUENCES)) == 8
    assert table.size_for(step([1] * (NUM_SEQUENCES + 1))) is None, "too many sequences"
    drafts = replace(step([12]), sampled_indexes=np.arange(NUM_SEQUENCES + 1))
    assert table.size_for(drafts) is None, "too many sampled tokens"


def doubled(inputs: ChunkInputs) -> Decoded:
    """Stands for a model's pass."""
    sampled: Tensor = inputs.token_ids[inputs.sampled_indexes]
    return Decoded(sampled[:, None] * 2, sampled * 3)


def test_the_largest_is_recorded_first_and_a_replay_gives_the_rows_of_the_step_alone() -> None:
    table = table_of()
    seen: list[int] = []

    def noted(inputs: ChunkInputs) -> Decoded:
        seen.append(len(inputs.token_ids))
        return doubled(inputs)

    def record(function: Callable[[], Decoded]) -> Callable[[], Decoded]:
        function()
        return function

    table.capture(noted, record)
    assert seen == [40, 16, 8]
    flat = step([3, 1, 6])
    decoded = table.replay(flat, 16, nothing_to_feed)
    assert decoded.logits[:, 0].tolist() == [2 * each for each in flat.token_ids[flat.sampled_indexes]]
    assert decoded.likeliest.tolist() == [3 * each for each in flat.token_ids[flat.sampled_indexes]]


def test_rows_and_inputs_stay_where_they_were_recorded() -> None:
    table = table_of()
    filled = [table.fill(step([3], seed), 8) for seed in range(3)]
    assert len({each.token_ids.data_ptr() for each in filled}) == 1
    assert {each.rows.data_ptr() for each in filled} == {table.rows_of(3).data_ptr()}


def test_padding_must_fit_into_a_row_of_a_block_table() -> None:
    table_of(full=PoolShape(max_blocks=10, unread_block=1))
    with pytest.raises(ValueError, match="does not hold 40 tokens of padding"):
        table_of(full=PoolShape(max_blocks=9, unread_block=1))


def test_a_step_wider_than_the_tables_is_refused() -> None:
    flat = step([2])
    wide = replace(flat, full=replace(flat.full, block_tables=(np.zeros(51, dtype=np.int64),)))
    with pytest.raises(ValueError, match="51 blocks"):
        table_of().fill(wide, 8)
