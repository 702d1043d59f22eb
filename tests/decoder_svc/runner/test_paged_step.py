"""A step as tensors describes the same step as its lists: attention computed from it equals the reference."""

from __future__ import annotations

import torch
from hypothesis import settings

from decoder_svc.scheduling.prompt import Span
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import Sizes, Step, StepCase, any_step
from tests.decoder_svc.runner.tensor_backend import TensorBackend


@settings(max_examples=150)
@any_step(torch.float32)
def test_attention_on_a_steps_tensors_is_the_reference(case: StepCase) -> None:
    case.check(TensorBackend)


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


def test_a_token_outside_of_any_span_has_a_span_of_one_token() -> None:
    chunks = [Chunk(3, 2, 2, 3), Chunk(10, 3, 3, 10, (Span(1, 4), Span(6, 2)))]
    paged = Step(chunks, Sizes(), 0).metadata(is_mutual_beyond_window=False).paged
    assert paged is not None
    assert paged.mutual is not None
    assert paged.mutual.starts.tolist() == [2, 1, 1, 5, 6, 6, 8, 9]
    assert paged.mutual.stops.tolist() == [3, 5, 5, 6, 8, 8, 9, 10]
