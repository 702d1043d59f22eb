"""Steps that compile every kernel: all kinds, and all rounded numbers of sequences."""

from __future__ import annotations

import pytest

from decoder_svc.runner.cuda.kernel_steps import MAX_NARROW_TOKENS, kernel_steps
from lookonce.families.base import Mask


@pytest.mark.parametrize(
    ("max_num_seqs", "counts"), [(1, [1]), (64, [1]), (65, [1, 65]), (256, [1, 65, 129]), (257, [1, 65, 129, 257])]
)
def test_every_rounded_number_of_sequences_is_there(max_num_seqs: int, counts: list[int]) -> None:
    steps = [step for step in kernel_steps(max_num_seqs, Mask.CAUSAL, 16, has_sliding_group=False) if step.chunks]
    assert sorted({len(step.chunks) for step in steps}) == counts
    assert max(counts) <= max_num_seqs
    for count in counts:
        of_count = [step for step in steps if len(step.chunks) == count]
        in_all = [sum(chunk.num_tokens for chunk in step.chunks) for step in of_count]
        assert in_all[0] == count
        assert in_all[1] == 2 * count
        assert in_all[2] > MAX_NARROW_TOKENS


def test_tokens_are_in_blocks_of_the_table() -> None:
    for block_size in (16, 256):
        for step in kernel_steps(3, Mask.CAUSAL, block_size, has_sliding_group=True):
            for chunk in step.chunks:
                assert len(chunk.block_ids) * block_size >= chunk.num_tokens
                assert chunk.sliding is not None
                assert chunk.sliding.block_ids == chunk.block_ids


@pytest.mark.parametrize("mask", Mask)
def test_kinds_with_and_without_mutual_spans(mask: Mask) -> None:
    steps = [step for step in kernel_steps(1, mask, 16, has_sliding_group=True) if step.chunks]
    kinds = {(step.chunks[0].num_tokens, bool(step.admitted[0].mutual_spans)) for step in steps}
    later = {False} if mask is Mask.CAUSAL else {False, True}
    assert kinds == {(num_tokens, sees_later) for num_tokens in (1, 2, MAX_NARROW_TOKENS + 1) for sees_later in later}
    assert all(step.chunks[0].sliding is not None for step in steps)


def test_all_requests_are_released() -> None:
    steps = list(kernel_steps(70, Mask.PROMPT, 16, has_sliding_group=False))
    for step, release in zip(steps[::2], steps[1::2], strict=True):
        assert release.released == tuple(admitted.request_id for admitted in step.admitted)
