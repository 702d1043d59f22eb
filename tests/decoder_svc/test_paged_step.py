"""A step as tensors says what the step's lists say: plain attention on it is the reference."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoder_svc.request import Span
from decoder_svc.runner.attention import LayerOptions
from tests.decoder_svc.attention_reference import Chunk
from tests.decoder_svc.attention_step import OPTIONS, SEEDS, SIZES, Sizes, Step, chunk_of_a_prompt
from tests.decoder_svc.tensor_backend import TensorBackend


@settings(max_examples=150, deadline=None)
@given(
    chunks=st.lists(chunk_of_a_prompt(), min_size=1, max_size=4),
    sizes=SIZES,
    options=OPTIONS,
    is_mutual_beyond_window=st.booleans(),
    has_sliding_group=st.booleans(),
    seed=SEEDS,
)
@example([Chunk(12, 5, 5, 12, (Span(2, 8),))], Sizes(), LayerOptions(1.0, window=3), False, True, 0)
@example([Chunk(12, 5, 5, 12, (Span(2, 8),))], Sizes(), LayerOptions(1.0, window=3), True, True, 0)
def test_attention_on_a_steps_tensors_is_the_reference(
    chunks: list[Chunk],
    sizes: Sizes,
    options: LayerOptions,
    is_mutual_beyond_window: bool,
    has_sliding_group: bool,
    seed: int,
) -> None:
    window = options.window if has_sliding_group else None
    step = Step(chunks, sizes, seed, torch.float32, window=window, backend=TensorBackend)
    step.check(options, is_mutual_beyond_window=is_mutual_beyond_window)


def test_tables_are_padded_and_numbers_are_those_of_the_sequences() -> None:
    chunks = [Chunk(9, 4, 4, 9), Chunk(3, 2, 2, 3), Chunk(14, 0, 2, 14)]
    step = Step(chunks, Sizes(block_size=4), 0)
    paged = step.metadata(is_mutual_beyond_window=False).paged
    assert paged is not None
    assert paged.query_starts.tolist() == [0, 5, 6, 20]
    assert paged.kv_lens.tolist() == [9, 3, 14]
    assert (paged.max_query_len, paged.max_kv_len) == (14, 14)
    assert paged.mutual is None
    assert paged.full.block_table.shape == (3, 4)
    for row, table in zip(paged.full.block_table.tolist(), step.tables, strict=True):
        assert tuple(row[: len(table)]) == table
    assert {paged.full.block_table.dtype, paged.kv_lens.dtype, paged.query_starts.dtype} == {torch.int32}
    assert paged.full.slot_mapping.tolist()[6:8] == [step.unread_slot] * 2, "tokens that are in the cache already"


def test_a_token_of_no_span_has_a_stretch_of_its_own() -> None:
    chunks = [Chunk(3, 2, 2, 3), Chunk(10, 3, 3, 10, (Span(1, 4), Span(6, 2)))]
    paged = Step(chunks, Sizes(), 0).metadata(is_mutual_beyond_window=False).paged
    assert paged is not None
    assert paged.mutual is not None
    assert paged.mutual.starts.tolist() == [2, 1, 1, 5, 6, 6, 8, 9]
    assert paged.mutual.stops.tolist() == [3, 5, 5, 6, 8, 8, 9, 10]
