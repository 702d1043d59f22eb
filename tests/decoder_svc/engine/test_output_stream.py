"""A stream gives every output once, in order, and exactly one end, however far behind its reader is."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.engine.output_stream import OutputStream, slices
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage, TokenLogprobs
from lookonce.errors import InternalError, UnavailableError


def output(
    *token_ids: int, reason: FinishReason | None = None, drafts: tuple[bool, ...] = (), completion: int = 0
) -> RequestOutput:
    logprobs = tuple(TokenLogprobs(((token_id, -1.0),)) for token_id in token_ids)
    return RequestOutput(token_ids, logprobs, reason, RequestUsage(completion_tokens=completion), drafts)


async def test_a_reader_that_is_behind_gets_the_admission_and_one_merged_output() -> None:
    stream = OutputStream()
    stream.push(output())
    stream.push(output(1, completion=1))
    stream.push(output(2, 3, drafts=(True, False), completion=3))
    stream.push(output(4, reason=FinishReason.LENGTH, completion=4))
    admission, merged = [one async for one in stream]
    assert admission.token_ids == ()
    assert merged.token_ids == (1, 2, 3, 4)
    assert [position.top[0][0] for position in merged.logprobs] == [1, 2, 3, 4]
    assert merged.was_draft == (False, True, False, False)
    assert merged.finish_reason is FinishReason.LENGTH
    assert merged.usage == RequestUsage(completion_tokens=4)


async def test_merged_outputs_have_the_latest_usage_that_one_of_them_had() -> None:
    stream = OutputStream()
    stream.push(output(1, completion=1))
    stream.push(replace(output(2), usage=None))
    assert (await anext(stream)).usage == RequestUsage(completion_tokens=1)
    stream.push(replace(output(3), usage=None))
    stream.push(replace(output(4), usage=None))
    assert (await anext(stream)).usage is None


class CountingTuple(tuple[Any, ...]):
    """A tuple that counts in `copied` the items that are read from it, or copied into a longer tuple."""

    copied: Counter[str]

    def __new__(cls, items: Iterable[Any], copied: Counter[str]) -> CountingTuple:
        made = super().__new__(cls, items)
        made.copied = copied
        return made

    def __iter__(self) -> Iterator[Any]:
        self.copied["items"] += len(self)
        return super().__iter__()

    def __add__(self, other: tuple[Any, ...]) -> CountingTuple:
        self.copied["items"] += len(self) + len(other)
        return CountingTuple(tuple.__add__(self, other), self.copied)


async def test_a_token_that_waits_for_its_reader_costs_the_same_however_long_the_backlog_is() -> None:
    num_tokens, copied, stream = 2000, Counter[str](), OutputStream()
    for index in range(num_tokens):
        token_ids, logprobs = (CountingTuple((index,), copied) for _ in range(2))
        stream.push(RequestOutput(token_ids, logprobs, None, RequestUsage()))
    merged = await anext(aiter(stream))
    for merged_items in (merged.token_ids, merged.logprobs):
        assert list[object](merged_items) == [*range(num_tokens)]
    assert 0 < copied["items"] <= 2 * 3 * num_tokens


def merged_at_each_push(waiting: deque[RequestOutput], added: RequestOutput) -> None:
    """Adds an output to the waiting ones, by the rule for what a reader sees: what follows tokens is merged to them."""
    if not (waiting and waiting[-1].token_ids):
        waiting.append(added)
        return
    last = waiting.pop()
    flags = [one.was_draft or (False,) * len(one.token_ids) for one in (last, added)]
    token_ids, logprobs = last.token_ids + added.token_ids, last.logprobs + added.logprobs
    waiting.append(RequestOutput(token_ids, logprobs, added.finish_reason, added.usage, flags[0] + flags[1]))


@given(turns=st.lists(st.one_of(st.just("read"), st.lists(st.booleans(), max_size=4)), max_size=30))
async def test_a_reader_gets_what_merging_at_each_push_gives(turns: list[str | list[bool]]) -> None:
    stream, waiting, num_tokens = OutputStream(), deque[RequestOutput](), 0
    reader = aiter(stream)
    for turn in turns:
        if isinstance(turn, str):
            if waiting:
                assert await anext(reader) == waiting.popleft()
            continue
        token_ids = range(num_tokens, num_tokens + len(turn))
        num_tokens = token_ids.stop
        pushed = output(*token_ids, drafts=tuple(turn) if any(turn) else (), completion=num_tokens)
        stream.push(pushed)
        merged_at_each_push(waiting, pushed)
    last = output(reason=FinishReason.STOP, completion=num_tokens)
    stream.push(last)
    merged_at_each_push(waiting, last)
    assert [one async for one in reader] == list(waiting)


async def test_a_push_does_not_wake_the_reader_and_a_wake_does() -> None:
    stream = OutputStream()
    reader = asyncio.ensure_future(anext(aiter(stream)))
    await asyncio.sleep(0)
    stream.push(output(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reader.done()
    stream.wake()
    assert (await reader).token_ids == (1,)


async def test_an_error_wakes_the_reader_and_comes_after_the_outputs_before_it() -> None:
    stream = OutputStream()
    reader = aiter(stream)
    stream.push(output(1))
    stream.fail(UnavailableError("encoder away"))
    assert (await anext(reader)).token_ids == (1,)
    with pytest.raises(UnavailableError):
        await anext(reader)
    # Once only: a stream that kept the error would keep the call's frames in memory.
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


async def test_nothing_comes_after_the_terminal_answer() -> None:
    ended, failed = OutputStream(), OutputStream()
    ended.push(output(1, reason=FinishReason.STOP))
    failed.fail(InternalError("internal error 7"))
    for stream in (ended, failed):
        stream.push(output(2))
        stream.fail(UnavailableError("late"))
    assert [one.token_ids async for one in ended] == [(1,)]
    with pytest.raises(InternalError):
        await anext(aiter(failed))


async def test_the_end_has_a_time_as_soon_as_it_is_given() -> None:
    ended, failed = OutputStream(), OutputStream()
    for stream in (ended, failed):
        stream.push(output(1))
        assert (stream.is_closed, stream.ended_s) == (False, None)
    ended.push(output(2, reason=FinishReason.STOP))
    failed.fail(InternalError("internal error 7"))
    for stream in (ended, failed):
        assert stream.is_closed
        assert stream.ended_s is not None


async def test_a_stream_keeps_the_context_of_the_call_that_opened_it() -> None:
    call = contextvars.ContextVar("call", default="none")
    call.set("first")
    stream = OutputStream()
    call.set("second")
    assert stream.context.run(call.get) == "first"


@given(num_tokens=st.integers(0, 40), size=st.integers(1, 12))
def test_slices_have_every_token_once_and_the_end_last(num_tokens: int, size: int) -> None:
    whole = output(*range(num_tokens), reason=FinishReason.STOP, drafts=(True,) * num_tokens, completion=num_tokens)
    parts = list(slices(whole, size))
    assert tuple(token for part in parts for token in part.token_ids) == whole.token_ids
    assert tuple(position for part in parts for position in part.logprobs) == whole.logprobs
    assert all(len(part.token_ids) <= size for part in parts)
    assert all(len(part.was_draft) == len(part.token_ids) for part in parts)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [FinishReason.STOP]
