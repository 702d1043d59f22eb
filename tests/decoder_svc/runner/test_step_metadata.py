"""Attention metadata of a step: lists for backends that read the host, tensors alone for those that do not."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_svc.runner.input_batch import FlatInputs, InputBatch
from decoder_svc.runner.step_metadata import recorded_metadata, step_metadata
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SlidingTable


def flat_inputs(*, has_sliding_group: bool = True) -> FlatInputs:
    """Returns a step with two new tokens after four cached ones, and a request of one token, in blocks of 4."""
    batch = InputBatch(4, 1, has_sliding_group=has_sliding_group)
    batch.set_num_blocks(8, 8)
    chunks = []
    for name, start, num_tokens, blocks, spans in (
        ("a", 4, 2, (3, 1), (Span(3, 3),)),
        ("b", 0, 1, (2,), ()),
    ):
        request_id, num_known = RequestId(name), start + num_tokens
        params = SamplingParams(max_tokens=1)
        batch.add(AdmittedRequest(request_id, (0,) * num_known, num_known, (), None, spans, params))
        sliding = SlidingTable(0, 0, blocks[::-1]) if has_sliding_group else None
        chunks.append(ScheduledChunk(request_id, start, num_tokens, start, 0, blocks, True, sliding))
        batch[request_id].set_blocks(chunks[-1])
    return batch.flatten(chunks)


def unmoved(host: Tensor) -> Tensor:
    return host


def test_a_backend_that_reads_the_host_gets_tables_and_no_tensors_of_the_step() -> None:
    metadata = step_metadata(flat_inputs(), unmoved, reads_tensors=False, is_mutual_beyond_window=True)
    assert metadata.paged is None
    assert [table.tolist() for table in metadata.full.block_tables] == [[3, 1], [2]]
    assert metadata.sliding is not None
    assert [table.tolist() for table in metadata.sliding.block_tables] == [[1, 3], [2]]
    assert metadata.full.slot_mapping.tolist() == [4, 5, 8]
    assert metadata.sliding.slot_mapping.tolist() == [12, 13, 8]
    assert (metadata.query_lens, metadata.kv_lens) == ((2, 1), (6, 1))
    assert metadata.mutual_spans == ((Span(3, 3),), ())
    assert metadata.is_mutual_beyond_window


def test_a_backend_that_reads_tensors_gets_the_same_step_as_tensors() -> None:
    metadata = step_metadata(flat_inputs(), unmoved, reads_tensors=True, is_mutual_beyond_window=False)
    assert metadata.full.block_tables == ()
    assert metadata.paged is not None
    assert metadata.paged.full.block_table.tolist() == [[3, 1], [2, 0]]
    assert metadata.paged.sliding is not None
    assert metadata.paged.mutual is not None
    assert not metadata.paged.mutual.is_beyond_window


def test_a_model_without_a_sliding_group_has_none_in_its_steps() -> None:
    flat = flat_inputs(has_sliding_group=False)
    metadata = step_metadata(flat, unmoved, reads_tensors=True, is_mutual_beyond_window=False)
    assert metadata.sliding is None
    assert metadata.paged is not None
    assert metadata.paged.sliding is None


def test_every_tensor_of_a_step_is_moved_to_the_device() -> None:
    moved: list[int] = []

    def move(host: Tensor) -> Tensor:
        copy = host.clone()
        moved.append(copy.data_ptr())
        return copy

    metadata = step_metadata(flat_inputs(), move, reads_tensors=True, is_mutual_beyond_window=False)
    step = metadata.paged
    assert step is not None
    assert step.sliding is not None
    groups = (step.full, step.sliding)
    tensors = [step.query_starts, step.kv_lens, metadata.full.slot_mapping]
    tensors += [tensor for group in groups for tensor in (group.slot_mapping, group.block_table, group.first_keys)]
    assert {tensor.data_ptr() for tensor in tensors} <= set(moved)


def test_a_recorded_step_has_no_numbers_on_the_host() -> None:
    step = step_metadata(flat_inputs(), unmoved, reads_tensors=True, is_mutual_beyond_window=True).paged
    assert step is not None
    metadata = recorded_metadata(step)
    assert metadata.paged is step
    assert (metadata.query_lens, metadata.kv_lens, metadata.mutual_spans) == ((), (), ())
    assert metadata.is_mutual_beyond_window
    assert metadata.sliding is not None
    assert torch.equal(metadata.full.slot_mapping, step.full.slot_mapping)
