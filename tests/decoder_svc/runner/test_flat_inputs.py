"""The arrays of random steps against a plain second implementation, token by token."""

from __future__ import annotations

import random

import pytest

from decoder_svc.runner.input_batch import BlockInputs, FlatInputs, InputBatch
from decoder_svc.scheduling.prompt import Positions
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SlidingTable

BLOCK_SIZE = 4
NUM_BLOCKS, NUM_SLIDING_BLOCKS = 1000, 500
MAX_TOKENS = 12


class PlainRequest:
    """One request, with everything that its tokens' arrays depend on, in lists."""

    def __init__(self, rng: random.Random, index: int, num_axes: int) -> None:
        self.name = RequestId(str(index))
        self.num_prompt = rng.randint(1, 20)
        self.num_known = self.num_prompt + rng.choice([0, 0, 1, 5])
        self.ids = [rng.randrange(1000) for _ in range(self.num_known)]
        self.delta = rng.randint(-5, 5) if num_axes > 1 else 0
        axes = tuple(tuple(rng.randrange(50) for _ in range(self.num_prompt)) for _ in range(num_axes))
        self.positions = Positions(axes, self.delta) if num_axes > 1 else None
        # Each in a table of its own.
        num_blocks = -(-(self.num_prompt + MAX_TOKENS) // BLOCK_SIZE)
        self.blocks = [index * 20 + place for place in range(num_blocks)]
        self.sliding_blocks = [index * 15 + place for place in range(num_blocks)]
        # Up to the last known token, or to an earlier one.
        self.stop = rng.choice([self.num_known, rng.randint(1, self.num_known)])
        self.start = rng.choice([self.stop - 1, rng.randrange(self.stop)])
        self.write_start = rng.choice([0, self.start, rng.randint(self.start, self.stop)])
        self.first_sliding = self.start // BLOCK_SIZE
        samples = self.stop == self.num_known
        self.drafts = tuple(rng.randrange(1000) for _ in range(rng.choice([0, 0, 2]))) if samples else ()
        self.samples = samples

    def admitted(self) -> AdmittedRequest:
        params = SamplingParams(max_tokens=MAX_TOKENS)
        return AdmittedRequest(self.name, tuple(self.ids), self.num_prompt, (), self.positions, (), params)

    def chunk(self) -> ScheduledChunk:
        num_tokens = self.stop - self.start + len(self.drafts)
        sliding = SlidingTable(self.first_sliding, self.first_sliding, tuple(self.sliding_blocks[self.first_sliding :]))
        return ScheduledChunk(
            self.name, self.start, num_tokens, self.write_start, 0, tuple(self.blocks), self.samples, sliding,
            self.drafts,
        )  # fmt: skip

    def tokens(self) -> range:
        return range(self.start, self.stop + len(self.drafts))

    def position(self, axis: int, token: int) -> int:
        if self.positions is None or token >= self.num_prompt:
            return token + self.delta
        return self.positions.axes[axis][token]

    def slot(self, token: int, blocks: list[int], unread: int) -> int:
        if token < self.write_start:
            return unread
        return blocks[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE


def blocks_of(inputs: BlockInputs | None) -> BlockInputs:
    assert inputs is not None
    return inputs


@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_every_token_has_its_id_position_and_slots(seed: int, num_axes: int) -> None:
    rng = random.Random(seed)
    requests = [PlainRequest(rng, index, num_axes) for index in range(rng.randint(1, 6))]
    batch = InputBatch(BLOCK_SIZE, num_axes, has_sliding_group=True)
    batch.set_num_blocks(NUM_BLOCKS, NUM_SLIDING_BLOCKS)
    for each in requests:
        batch.add(each.admitted())
        row, chunk = batch[each.name], each.chunk()
        row.set_blocks(chunk)
        row.set_drafts(chunk.draft_ids)
    flat: FlatInputs = batch.flatten([each.chunk() for each in requests])
    tokens = [(each, token) for each in requests for token in each.tokens()]
    assert flat.token_ids.tolist() == [(*each.ids[: each.stop], *each.drafts)[token] for each, token in tokens]
    for axis in range(num_axes):
        assert flat.positions[axis].tolist() == [each.position(axis, token) for each, token in tokens]
    unread, unread_sliding = NUM_BLOCKS * BLOCK_SIZE, NUM_SLIDING_BLOCKS * BLOCK_SIZE
    slots = [each.slot(token, each.blocks, unread) for each, token in tokens]
    assert blocks_of(flat.full).slot_mapping.tolist() == slots
    slots = [each.slot(token, each.sliding_blocks, unread_sliding) for each, token in tokens]
    assert blocks_of(flat.sliding).slot_mapping.tolist() == slots
    assert flat.query_lens == tuple(len(each.tokens()) for each in requests)
    assert flat.kv_lens == tuple(each.tokens().stop for each in requests)
    ends = [sum(flat.query_lens[: index + 1]) for index in range(len(requests))]
    sampled = [
        place
        for each, end in zip(requests, ends, strict=True)
        if each.samples
        for place in range(end - 1 - len(each.drafts), end)
    ]
    assert flat.sampled_indexes.tolist() == sampled
