"""The first and the last output of a request are delivered at once, the rest batched, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextvars
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.engine.delivery import Delivery
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage
from lookonce.errors import InternalError, UnavailableError

# Longer than any test and than any machine has been up: outputs held back this long are not released by time.
FOREVER_S = 1e9
A, B = RequestId("a"), RequestId("b")


def output(*token_ids: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(token_ids, (), reason, RequestUsage())


class Reader:
    """Reads a stream as soon as it is woken."""

    def __init__(self, stream: OutputStream) -> None:
        self.outputs: list[tuple[int, ...]] = []
        self.error: Exception | None = None
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: OutputStream) -> None:
        try:
            async for one in stream:
                self.outputs.append(one.token_ids)
        except InternalError as error:
            self.error = error


async def everything_ready() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Delivery:
    """A delivery that releases nothing by time after its first release."""
    monkeypatch.setattr("decoder_svc.engine.delivery._S_PER_STREAM", FOREVER_S)
    return Delivery(FOREVER_S)


async def begun(delivery: Delivery, *request_ids: RequestId) -> list[Reader]:
    """Returns readers that have read the admission and two tokens. The second token was the first release."""
    readers = [Reader(delivery.open(request_id)) for request_id in request_ids]
    for token in ((), (1,), (2,)):
        delivery.deliver([(request_id, output(*token)) for request_id in request_ids])
        await everything_ready()
    assert all(reader.outputs == [(), (1,), (2,)] for reader in readers)
    return readers


async def test_outputs_between_first_and_last_are_held_back_and_come_with_the_last(slow: Delivery) -> None:
    (reader,) = await begun(slow, A)
    slow.deliver([(A, output(3))])
    slow.deliver([(A, output(4))])
    await everything_ready()
    assert reader.outputs == [(), (1,), (2,)]
    slow.deliver([(A, output(5, reason=FinishReason.LENGTH))])
    await reader.task
    assert reader.outputs == [(), (1,), (2,), (3, 4, 5)]
    assert len(slow) == 0
    slow.close(UnavailableError("over"))


async def test_first_and_last_tokens_of_other_requests_do_not_wait_for_held_back_ones(slow: Delivery) -> None:
    (reader,) = await begun(slow, A)
    slow.deliver([(A, output(3))])
    other = Reader(slow.open(B))
    slow.deliver([(B, output())])
    slow.deliver([(B, output(1))])
    await everything_ready()
    assert other.outputs == [(), (1,)]
    slow.deliver([(B, output(reason=FinishReason.ABORT))])
    await other.task
    assert reader.outputs[-1] == (2,)
    slow.close(UnavailableError("over"))
    reader.task.cancel()


async def test_held_tokens_come_without_a_further_step() -> None:
    delivery = Delivery(longest_hold_s=0.001)
    readers = await begun(delivery, A, B)
    for token in range(3, 9):
        delivery.deliver([(A, output(token)), (B, output(token))])
    async with asyncio.timeout(10):
        while any(sum(map(len, reader.outputs)) < 8 for reader in readers):
            await asyncio.sleep(0.001)
    assert all(len(reader.outputs) < 9 for reader in readers)
    for reader in readers:
        reader.task.cancel()


async def test_an_error_comes_at_once_after_the_outputs_that_were_held_back(slow: Delivery) -> None:
    (reader,) = await begun(slow, A)
    slow.deliver([(A, output(3))])
    slow.deliver([(A, InternalError("internal error 7")), (A, output(4))])
    await reader.task
    assert reader.outputs[-1] == (3,)
    assert isinstance(reader.error, InternalError)
    assert A not in slow
    slow.close(UnavailableError("over"))


async def test_without_a_hold_time_nothing_is_held_back() -> None:
    delivery = Delivery(longest_hold_s=0.0)
    (reader,) = await begun(delivery, A)
    for token in range(3, 8):
        delivery.deliver([(A, output(token))])
        await everything_ready()
    assert reader.outputs[2:] == [(2,), (3,), (4,), (5,), (6,), (7,)]
    reader.task.cancel()


async def test_while_many_readers_are_woken_others_have_their_turn() -> None:
    delivery = Delivery(longest_hold_s=0.0)
    names = [RequestId(f"r{index}") for index in range(64)]
    readers = await begun(delivery, *names)
    delivery.deliver([(name, output(3)) for name in names])
    num_told: list[int] = []
    while not num_told or num_told[-1] < len(names):
        await asyncio.sleep(0)
        num_told.append(sum(reader.outputs[-1] == (3,) for reader in readers))
    assert max(b - a for a, b in itertools.pairwise([0, *num_told])) <= 8
    for reader in readers:
        reader.task.cancel()


async def test_a_close_ends_every_stream(slow: Delivery) -> None:
    (reader,) = await begun(slow, A)
    slow.deliver([(A, output(3))])
    slow.close(InternalError("internal error 9"))
    await reader.task
    assert reader.outputs[-1] == (3,)
    assert isinstance(reader.error, InternalError)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=60), st.booleans())
@settings(max_examples=100)
def test_no_token_is_lost_or_delivered_twice(steps: list[tuple[int, int, int]], holds: bool) -> None:
    """Steps are (request, its tokens, turns of the event loop before the next step)."""

    async def run() -> None:
        delivery = Delivery(0.0005 if holds else 0.0)
        names = [RequestId(f"r{index}") for index in range(4)]
        readers = [Reader(delivery.open(name)) for name in names]
        sent: list[list[int]] = [[] for _ in names]
        delivery.deliver([(name, output()) for name in names])
        for index, num_tokens, num_turns in steps:
            tokens = tuple(range(len(sent[index]), len(sent[index]) + num_tokens))
            sent[index] += tokens
            delivery.deliver([(names[index], output(*tokens))])
            for _ in range(num_turns):
                await asyncio.sleep(0)
        delivery.deliver([(name, output(reason=FinishReason.STOP)) for name in names])
        await asyncio.gather(*(reader.task for reader in readers))
        assert [[token for one in reader.outputs for token in one] for reader in readers] == sent
        assert len(delivery) == 0

    asyncio.run(run())


async def test_work_for_a_request_has_the_context_of_its_call() -> None:
    delivery, call = Delivery(0.0), contextvars.ContextVar("call", default="none")
    for request_id in (A, B):
        call.set(f"call of {request_id}")
        delivery.open(request_id)
    call.set("another")
    assert [delivery.context(request_id).run(call.get) for request_id in (A, B)] == ["call of a", "call of b"]
    delivery.deliver([(A, output(reason=FinishReason.ABORT))])
    assert delivery.context(A).run(call.get) == "none", "a request that has ended has no call"
