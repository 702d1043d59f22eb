"""Requests move forward by chunks before their tokens are known, and by tokens afterwards."""

from __future__ import annotations

import pytest

from decoder_svc.scheduling.request import Request, RequestId, RequestState
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from tests.decoder_svc.scheduling.simulation import request, scheduler


def token(one: Request, token_id: int = 7) -> list[SampledToken]:
    return [SampledToken(one.request_id, token_id, None)]


def started(one: Request, *, num_blocks: int = 64) -> tuple[Scheduler, SchedulerOutput]:
    """A scheduler whose first step, which computes the whole prompt, is in flight."""
    target = scheduler(num_blocks=num_blocks)
    target.add(one)
    output = target.schedule()
    target.advance(output)
    return target, output


def test_a_chunk_in_flight_counts_as_computed_and_its_token_as_unknown() -> None:
    one = request("a", 6, max_tokens=3)
    target, output = started(one)
    assert (one.num_computed_tokens, one.num_tokens, one.num_output_tokens) == (6, 7, 0)
    assert one.usage.completion_tokens == 0
    ahead = target.schedule()
    assert [(chunk.start, chunk.num_tokens, chunk.samples) for chunk in ahead.chunks] == [(6, 1, True)]
    (update,) = target.update(output, token(one))
    assert update.finish_reason is None
    assert (one.num_computed_tokens, one.num_tokens, one.output_token_ids) == (6, 7, [7])


def test_nothing_is_scheduled_behind_the_last_token() -> None:
    one = request("a", 6, max_tokens=1)
    target, output = started(one)
    assert target.schedule().chunks == ()
    (update,) = target.update(output, token(one))
    assert update.finish_reason is FinishReason.LENGTH


def test_a_token_behind_a_stop_id_is_dropped() -> None:
    one = request("a", 6, max_tokens=5, stop_token_ids=frozenset({9}))
    target, output = started(one)
    ahead = target.schedule()
    (update,) = target.update(output, token(one, 9))
    assert update.finish_reason is FinishReason.STOP
    target.advance(ahead)
    assert target.update(ahead, token(one, 8)) == []
    assert one.output_token_ids == [9]
    assert one.usage.completion_tokens == 1
    target.check_integrity()


def test_an_aborted_request_takes_nothing_from_the_step_in_flight() -> None:
    one = request("a", 6, max_tokens=5)
    target, output = started(one)
    assert target.abort(RequestId("a")) is one
    assert target.update(output, token(one)) == []
    assert one.output_token_ids == []
    assert one.usage.completion_tokens == 0
    target.check_integrity()


def test_a_request_that_is_preempted_in_flight_keeps_the_token() -> None:
    first, second = request("a", 8, max_tokens=5), request("b", 4, max_tokens=5, arrival_s=1)
    target = scheduler(num_blocks=3)
    target.add(first)
    target.add(second)
    output = target.schedule()
    target.advance(output)
    target.schedule()
    assert second.state is RequestState.WAITING
    updates = target.update(output, [*token(first), *token(second, 8)])
    assert [update.token.token_id for update in updates] == [7, 8]
    assert (second.num_computed_tokens, second.output_token_ids) == (0, [8])
    target.check_integrity()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_block_with_an_unknown_token_is_found_when_it_is_known_and_computed(is_known: bool) -> None:
    one = request("a", 7, max_tokens=5)
    target, output = started(one)
    ahead = target.schedule()
    target.update(output, token(one))
    target.advance(ahead)
    if is_known:
        target.update(ahead, token(one))
    late = request("late", 9, text="a", arrival_s=1)
    late.token_ids[7] = 7
    assert target.kv_cache.find_prefix(late).num_tokens == (8 if is_known else 4)


def test_a_step_that_fails_takes_the_one_behind_it_along_and_only_its_own_requests_end() -> None:
    one, other = request("a", 6, max_tokens=5), request("b", 6, max_tokens=5, arrival_s=1)
    target, output = started(one)
    target.add(other)
    behind = target.schedule()
    assert {chunk.request_id for chunk in behind.chunks} == {"a", "b"}
    assert target.fail_step(output, behind) == [one]
    assert (other.state, other.num_computed_tokens, other.num_unknown_tokens) == (RequestState.WAITING, 0, 0)
    target.check_integrity()
