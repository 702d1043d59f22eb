"""The runner's record of requests: blocks, drafts, positions, and the arrays that a step's chunks become."""

from __future__ import annotations

import pytest

from decoder_svc.runner.input_batch import InputBatch, RequestBlocks, RequestRow
from decoder_svc.scheduling.prompt import Positions, Span
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SlidingTable

BLOCK_SIZE = 4
FIRST, SECOND = RequestId("first"), RequestId("second")


def admitted(
    request_id: RequestId,
    num_tokens: int,
    *,
    num_prompt_tokens: int | None = None,
    positions: Positions | None = None,
    mutual_spans: tuple[Span, ...] = (),
) -> AdmittedRequest:
    """A request whose token ids are 100, 101, 102, …"""
    ids = tuple(range(100, 100 + num_tokens))
    params = SamplingParams(max_tokens=8)
    return AdmittedRequest(request_id, ids, num_prompt_tokens or num_tokens, (), positions, mutual_spans, params)


def chunk(request_id: RequestId, start: int, num_tokens: int, *blocks: int, **further: object) -> ScheduledChunk:
    """A chunk that writes all its tokens and samples at its end."""
    fields = {"write_start": start, "block_start": 0, "samples": True, **further}
    return ScheduledChunk(request_id, start, num_tokens, block_ids=blocks, **fields)  # type: ignore[arg-type]


def row(num_tokens: int = 6, **options: object) -> RequestRow:
    return RequestRow(admitted(FIRST, num_tokens, **options), BLOCK_SIZE, has_sliding_group=False)  # type: ignore[arg-type]


def test_tokens_lie_in_the_slots_of_their_blocks() -> None:
    blocks = RequestBlocks(12, BLOCK_SIZE)
    blocks.set(0, (7, 2))
    blocks.set(2, (5,))
    assert blocks.slots(2, 10, 2, unread_slot=99).tolist() == [30, 31, 8, 9, 10, 11, 20, 21]
    assert blocks.blocks(9).tolist() == [7, 2, 5]
    assert blocks.blocks(8).tolist() == [7, 2]


def test_tokens_before_the_write_start_go_to_the_unread_slot() -> None:
    blocks = RequestBlocks(8, BLOCK_SIZE)
    blocks.set(0, (1, 2))
    assert blocks.slots(1, 5, 3, unread_slot=99).tolist() == [99, 99, 7, 8]
    assert blocks.slots(1, 5, 0, unread_slot=99).tolist() == [5, 6, 7, 8]
    assert blocks.slots(1, 3, 8, unread_slot=99).tolist() == [99, 99]


def test_released_blocks_are_left_out_of_the_table() -> None:
    blocks = RequestBlocks(12, BLOCK_SIZE)
    blocks.set(0, (7, 2, 5))
    blocks.first = 1
    assert blocks.blocks(12).tolist() == [2, 5]
    assert blocks.first_token == BLOCK_SIZE


@pytest.mark.parametrize(
    ("sampled", "num_taken"),
    [((1, 2, 3), 3), ((1, 9, 3), 2), ((9, 2, 3), 1)],
    ids=["all drafts accepted", "the second draft rejected", "the first draft rejected"],
)
def test_sampled_tokens_are_taken_up_to_the_first_that_differs_from_its_draft(
    sampled: tuple[int, ...], num_taken: int
) -> None:
    request = row(3)
    request.set_drafts((1, 2))
    assert [context.tolist()[3:] for context in request.contexts()] == [[], [1], [1, 2]]
    assert request.accept(sampled) == num_taken
    assert request.token_ids.tolist() == [100, 101, 102, *sampled[:num_taken]]
    assert request.draft_ids == ()


def test_later_drafts_replace_earlier_ones() -> None:
    request = row(3)
    request.set_drafts((1, 2))
    request.set_drafts((5,))
    assert request.ids_between(2, 4).tolist() == [102, 5]
    assert request.num_tokens == 3


def test_positions_of_the_prompt_are_the_requests_own_and_generated_tokens_count_on() -> None:
    positions = Positions(((0, 1, 1, 1), (0, 1, 1, 2), (0, 1, 2, 2)), delta=-1)
    request = row(6, num_prompt_tokens=4, positions=positions)
    assert request.positions(2, 6, 3).tolist() == [[1, 1, 3, 4], [1, 2, 3, 4], [2, 2, 3, 4]]
    assert request.positions(5, 6, 3).tolist() == [[4], [4], [4]]


def test_only_spans_that_overlap_a_chunk_are_listed() -> None:
    spans = (Span(0, 3), Span(5, 2))
    request = row(8, mutual_spans=spans)
    assert request.mutual_spans_between(3, 5) == ()
    assert request.mutual_spans_between(2, 6) == spans
    assert request.mutual_spans_between(6, 8) == spans[1:]
    assert request.mutual_spans_between(8, 9) == (), "generated tokens are in no span"


def test_chunks_are_flattened_one_after_the_other() -> None:
    batch = InputBatch(BLOCK_SIZE, 1, has_sliding_group=False)
    batch.set_num_blocks(10, 0)
    batch.add(admitted(FIRST, 6))
    batch.add(admitted(SECOND, 3))
    chunks = (chunk(FIRST, 2, 3, 4, 1, write_start=3, samples=False), chunk(SECOND, 2, 3, 0, 9, draft_ids=(7, 8)))
    for each in chunks:
        batch[each.request_id].set_blocks(each)
        batch[each.request_id].set_drafts(each.draft_ids)
    flat = batch.flatten(chunks)
    assert flat.token_ids.tolist() == [102, 103, 104, 102, 7, 8]
    assert flat.positions.tolist() == [[2, 3, 4, 2, 3, 4]]
    assert flat.full.slot_mapping.tolist() == [40, 19, 4, 2, 3, 36]
    assert [table.tolist() for table in flat.full.block_tables] == [[4, 1], [0, 9]]
    assert (flat.query_lens, flat.kv_lens) == ((3, 3), (5, 5))
    assert flat.sliding is None
    assert flat.sampled_ids == (SECOND,)
    assert flat.sampled_indexes.tolist() == [3, 4, 5], "the last known token and each draft"


def test_the_sliding_group_has_its_own_blocks_and_unread_slot() -> None:
    batch = InputBatch(BLOCK_SIZE, 1, has_sliding_group=True)
    batch.set_num_blocks(10, 6)
    batch.add(admitted(FIRST, 10))
    part = chunk(FIRST, 8, 2, 3, 4, 5, write_start=9, sliding=SlidingTable(1, 1, (2, 0)))
    batch[FIRST].set_blocks(part)
    flat = batch.flatten((part,))
    assert flat.full.slot_mapping.tolist() == [40, 21]
    assert flat.sliding is not None
    assert flat.sliding.slot_mapping.tolist() == [24, 1]
    assert flat.sliding.block_tables[0].tolist() == [2, 0]
    assert (flat.full.first_tokens, flat.sliding.first_tokens) == ((0,), (BLOCK_SIZE,))


def test_removed_requests_are_gone_and_unknown_ones_are_ignored() -> None:
    batch = InputBatch(BLOCK_SIZE, 1, has_sliding_group=False)
    batch.add(admitted(FIRST, 2))
    batch.remove(FIRST)
    batch.remove(SECOND)
    assert len(batch) == 0
    with pytest.raises(KeyError):
        batch[FIRST]
