"""Padding of a step: it fills up the number of tokens, and leaves requests, samples and their KV blocks alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.input_batch import FlatInputs, InputBatch, IntArray
from decoder_svc.runner.padding import padded_inputs
from decoder_svc.runner.step_metadata import PreparedInputs
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SlidingTable
from tests.decoder_svc.runner.recording_runner import RecordingRunner
from tests.example_device.fixed_steps.runner import FixedStepsRunner
from tests.parity import families
from tests.parity.offline import OfflineModel, Session

BLOCK_SIZE, NUM_BLOCKS, NUM_SLIDING_BLOCKS = 4, 60, 40
# All questions at once, and some to spare: attention of some runners reads the whole pool for each padded token.
POOL_BLOCKS = 100
UNREAD = (NUM_BLOCKS, NUM_SLIDING_BLOCKS)
# No key or value of a tiny model.
UNTOUCHED = 777.0


def step(lengths: list[int], num_axes: int, *, has_sliding_group: bool) -> FlatInputs:
    """A step in which each request computes its first tokens and samples."""
    batch = InputBatch(BLOCK_SIZE, num_axes, has_sliding_group=has_sliding_group)
    batch.set_num_blocks(NUM_BLOCKS, NUM_SLIDING_BLOCKS)
    chunks = []
    for index, length in enumerate(lengths):
        name, num_blocks = RequestId(str(index)), -(-length // BLOCK_SIZE)
        blocks = tuple(range(10 * index, 10 * index + num_blocks))
        sliding = SlidingTable(0, 0, blocks[::-1]) if has_sliding_group else None
        batch.add(AdmittedRequest(name, (7,) * length, length, (), None, (), SamplingParams(max_tokens=1)))
        chunks.append(ScheduledChunk(name, 0, length, 0, 0, blocks, True, sliding))
        batch[name].set_blocks(chunks[-1])
    return batch.flatten(chunks)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    num_missing=st.integers(0, 100),
    num_axes=st.sampled_from((1, 3)),
    has_sliding_group=st.booleans(),
)
def test_padding_follows_the_step_and_stays_in_the_block_that_nobody_reads(
    lengths: list[int], num_missing: int, num_axes: int, has_sliding_group: bool
) -> None:
    flat = step(lengths, num_axes, has_sliding_group=has_sliding_group)
    num_tokens = sum(lengths)
    padded = padded_inputs(flat, num_tokens + num_missing, block_size=BLOCK_SIZE, unread_blocks=UNREAD)
    assert len(padded.token_ids) == padded.positions.shape[1] == sum(padded.query_lens) == num_tokens + num_missing
    assert np.array_equal(padded.token_ids[:num_tokens], flat.token_ids)
    assert np.array_equal(padded.positions[:, :num_tokens], flat.positions)
    assert padded.query_lens[: len(lengths)] == flat.query_lens
    assert (padded.sampled_ids, padded.sampled_indexes.tolist()) == (flat.sampled_ids, flat.sampled_indexes.tolist())
    assert max(padded.query_lens) == max(lengths), "a step of single tokens stays one"
    num_sequences = len(padded.query_lens)
    assert num_sequences == len(padded.kv_lens) == len(padded.mutual_spans)
    assert padded.kv_lens[len(lengths) :] == padded.query_lens[len(lengths) :], "padding sees only itself"
    groups = [(padded.full, flat.full, NUM_BLOCKS)]
    if has_sliding_group:
        assert padded.sliding is not None
        assert flat.sliding is not None
        groups.append((padded.sliding, flat.sliding, NUM_SLIDING_BLOCKS))
    for blocks, own, unread in groups:
        assert np.array_equal(blocks.slot_mapping[:num_tokens], own.slot_mapping)
        assert set((blocks.slot_mapping[num_tokens:] // BLOCK_SIZE).tolist()) <= {unread}
        assert num_sequences == len(blocks.block_tables) == len(blocks.first_tokens)
        for table, length in zip(blocks.block_tables[len(lengths) :], padded.kv_lens[len(lengths) :], strict=True):
            assert set(table.tolist()) == {unread}
            assert len(table) * BLOCK_SIZE >= length


def test_a_step_that_fits_is_not_copied() -> None:
    flat = step([3, 1], 1, has_sliding_group=True)
    assert padded_inputs(flat, 4, block_size=BLOCK_SIZE, unread_blocks=UNREAD) is flat


def test_a_step_cannot_be_padded_to_fewer_tokens() -> None:
    flat = step([3, 1], 1, has_sliding_group=False)
    with pytest.raises(ValueError, match="a step of 4 tokens cannot be padded to 3"):
        padded_inputs(flat, 3, block_size=BLOCK_SIZE, unread_blocks=UNREAD)


def with_runner(model: OfflineModel, kind: type[ModelRunnerBase]) -> OfflineModel:
    """The same model and questions in another device's runner."""
    return replace(model, runner=kind(model.runner.config, model.runner.family))


@pytest.mark.parametrize("name", ["llava_clip", "gemma3", "gemma4"])
def test_padding_writes_no_slot_of_a_block_that_a_request_may_have(
    name: str, tiny_family: Callable[[str], families.Conformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the slots whose contents change with those that the requests' own tokens are written to."""
    model = with_runner(tiny_family(name).offline, FixedStepsRunner)
    session = Session(model, num_blocks=POOL_BLOCKS)
    runner = model.runner
    pools = runner.backend._pools  # type: ignore[attr-defined]
    for pool in (pool for pair in pools for pool in pair):
        pool.fill_(UNTOUCHED)
    flatten = runner.batch.flatten
    own: dict[bool, list[IntArray]] = {False: [], True: []}
    num_own, num_run = [], []

    def noting(chunks: tuple[ScheduledChunk, ...]) -> FlatInputs:
        flat = flatten(chunks)
        own[False].append(flat.full.slot_mapping)
        own[True].append(flat.full.slot_mapping if flat.sliding is None else flat.sliding.slot_mapping)
        num_own.append(len(flat.token_ids))
        return flat

    monkeypatch.setattr(runner.batch, "flatten", noting)
    embed = runner._embed

    def noting_tokens(inputs: PreparedInputs, chunks: tuple[ScheduledChunk, ...]) -> object:
        num_run.append(len(inputs.token_ids))
        return embed(inputs, chunks)

    monkeypatch.setattr(runner, "_embed", noting_tokens)
    questions = model.questions[:4]
    assert session.ask([question.prompt for question in questions]).token_ids == [each.expected for each in questions]
    assert any(run > wanted for run, wanted in zip(num_run, num_own, strict=True)), "some steps were padded"
    sliding_layers = runner.get_kv_cache_spec().sliding_layers
    for layer, pair in enumerate(pools):
        wanted = set(np.concatenate(own[layer in sliding_layers]).tolist())
        for pool in pair:
            slots = pool.flatten(0, 1).flatten(1)
            changed = set((slots != UNTOUCHED).any(1).nonzero().flatten().tolist())
            unread = set(range(len(slots) - runner.config.block_size, len(slots)))
            assert changed - unread == wanted - unread
            assert changed & unread, "padding went there"


class PaddedCPURunner(CPUModelRunner):
    """The native kernels with steps of multiples of 24 tokens."""

    def _padded_num_tokens(self, num_tokens: int) -> int:
        return -(-num_tokens // 24) * 24


class PaddedRecordingRunner(RecordingRunner):
    """A device with graphs whose steps have at least 8 tokens, which is also the size of its largest graph."""

    def _padded_num_tokens(self, num_tokens: int) -> int:
        return max(8, num_tokens)


@pytest.mark.parametrize("kind", [PaddedCPURunner, PaddedRecordingRunner])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_padding_changes_no_answer_of_native_kernels_and_graphs(
    name: str, kind: type[ModelRunnerBase], tiny_family: Callable[[str], families.Conformance]
) -> None:
    model = with_runner(tiny_family(name).offline, kind)
    session = Session(model, num_blocks=POOL_BLOCKS)
    model.runner.capture_model()
    # Fewer requests than the largest graph holds, then more.
    for questions in (model.questions[:3], model.questions):
        answers = session.ask([question.prompt for question in questions])
        assert answers.token_ids == [question.expected for question in questions]
        if isinstance(model.runner, RecordingRunner):
            assert set(model.runner.replayed) == {8}, "a padded step of single tokens is still one for graphs"
