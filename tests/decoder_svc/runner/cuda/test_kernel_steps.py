"""Steps that compile every kernel: all kinds, and all rounded numbers of sequences."""

from __future__ import annotations

import pytest

from decoder_svc.runner.cuda.kernel_steps import kernel_steps
from lookonce.families.base import Mask


@pytest.mark.parametrize(
    ("max_num_seqs", "counts"), [(1, [1]), (64, [1]), (65, [1, 65]), (256, [1, 65, 129]), (257, [1, 65, 129, 257])]
)
def test_every_rounded_number_of_sequences_is_there(max_num_seqs: int, counts: list[int]) -> None:
    steps = [step for step in kernel_steps(max_num_seqs, Mask.CAUSAL, has_sliding_group=False) if step.chunks]
    assert sorted({len(step.chunks) for step in steps}) == counts
    assert max(counts) <= max_num_seqs
    assert {chunk.num_tokens for step in steps for chunk in step.chunks} == {1, 2}


@pytest.mark.parametrize("mask", Mask)
def test_kinds_with_and_without_mutual_spans(mask: Mask) -> None:
    steps = [step for step in kernel_steps(1, mask, has_sliding_group=True) if step.chunks]
    kinds = {(step.chunks[0].num_tokens, bool(step.admitted[0].mutual_spans)) for step in steps}
    later = {False} if mask is Mask.CAUSAL else {False, True}
    assert kinds == {(num_tokens, sees_later) for num_tokens in (1, 2) for sees_later in later}
    assert all(step.chunks[0].sliding is not None for step in steps)


def test_all_requests_are_released() -> None:
    steps = list(kernel_steps(70, Mask.PROMPT, has_sliding_group=False))
    for step, release in zip(steps[::2], steps[1::2], strict=True):
        assert release.released == tuple(admitted.request_id for admitted in step.admitted)
