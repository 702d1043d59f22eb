"""The tokens of a launched step: expected at the launch, learnt when they are read."""

from __future__ import annotations

import torch

from decoder_svc.runner.input_batch import RequestRow
from decoder_svc.runner.sampled.constrained_sample import sample_rows
from decoder_svc.runner.sampled.pending_step import PendingStep
from decoder_svc.runner.sampling.sampler import PendingSample, SampledRows
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest

A, B = RequestId("a"), RequestId("b")


def row(request_id: RequestId) -> RequestRow:
    admitted = AdmittedRequest(request_id, (1, 2, 3), 3, (), None, (), SamplingParams(max_tokens=8))
    return RequestRow(admitted, 4, has_sliding_group=False)


def sampled(
    *token_ids: int, may_run_ahead: bool = True, repeated: tuple[int, ...] = (), nan: tuple[int, ...] = ()
) -> PendingSample:
    ids = list(token_ids)
    rows = SampledRows(ids, [None] * len(ids), repeated, nan)
    return PendingSample(torch.tensor(ids), may_run_ahead, lambda: rows)


def test_two_steps_may_be_launched_before_the_first_is_read() -> None:
    first, second = row(A), row(B)
    one = PendingStep()
    one.add(sampled(7, 8), (A, B), (first, second))
    assert one.may_run_ahead
    assert (first.num_tokens, first.unknown_place, second.unknown_place) == (4, 0, 1)
    behind = PendingStep()
    behind.add(sampled(9), (B,), (second,))
    assert [(token.request_id, token.token_id) for token in one.tokens()] == [(A, 7), (B, 8)]
    assert (first.unknown_place, second.unknown_place) == (None, 0)
    assert [token.token_id for token in behind.tokens()] == [9]
    assert second.token_ids.tolist() == [1, 2, 3, 8, 9]
    assert second.unknown_place is None


def test_places_count_on_over_forward_passes() -> None:
    rows = [row(A), row(B)]
    step = PendingStep()
    step.add(sampled(7), (A,), rows[:1])
    step.add(sampled(8), (B,), rows[1:])
    assert [each.unknown_place for each in rows] == [0, 1]
    assert torch.cat(step.sampled_ids).tolist() == [7, 8]


def test_drafts_are_settled_when_they_are_read_and_nothing_runs_ahead_of_them() -> None:
    drafting = row(A)
    drafting.set_drafts((5, 6))
    assert len(sample_rows([drafting], [None])) == 3
    step = PendingStep()
    step.add(sampled(5, 4, 3), (A,), (drafting,))
    assert not step.may_run_ahead
    assert drafting.num_tokens == 3
    assert [token.token_id for token in step.tokens()] == [5, 4]
    assert drafting.token_ids.tolist() == [1, 2, 3, 5, 4]


def test_nothing_runs_ahead_of_a_sample_that_the_host_must_see() -> None:
    step = PendingStep()
    step.add(sampled(5, may_run_ahead=False), (A,), (row(A),))
    assert not step.may_run_ahead


def test_a_token_that_was_sampled_behind_a_wrong_id_is_taken_back() -> None:
    first, second = row(A), row(B)
    one = PendingStep()
    one.add(sampled(7, 8, repeated=(1,)), (A, B), (first, second))
    behind = PendingStep()
    behind.add(sampled(5, 6), (A, B), (first, second))
    assert [(token.token_id, token.is_corrected) for token in one.tokens()] == [(7, False), (8, True)]
    assert second.token_ids.tolist() == [1, 2, 3, 8]
    assert second.unknown_place is None
    again = PendingStep()
    again.add(sampled(4), (B,), (second,))
    assert [(token.request_id, token.token_id) for token in behind.tokens()] == [(A, 5)]
    assert [(token.request_id, token.token_id) for token in again.tokens()] == [(B, 4)]
    assert second.token_ids.tolist() == [1, 2, 3, 8, 4]


def test_a_token_that_is_drawn_again_before_anybody_has_read_it_is_like_others() -> None:
    alone = row(A)
    step = PendingStep()
    step.add(sampled(7, repeated=(0,)), (A,), (alone,))
    assert [(token.token_id, token.is_corrected) for token in step.tokens()] == [(7, False)]
    assert alone.token_ids.tolist() == [1, 2, 3, 7]


def test_tokens_of_nan_are_marked_drafts_as_well() -> None:
    drafting, plain = row(A), row(B)
    drafting.set_drafts((5, 6))
    step = PendingStep()
    step.add(sampled(5, 6, 3, 8, nan=(1, 3)), (A, B), (drafting, plain))
    assert [(token.request_id, token.is_nan) for token in step.tokens()] == [
        (A, False),
        (A, True),
        (A, False),
        (B, True),
    ]
