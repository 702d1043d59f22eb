"""A request is submitted once, gets one answer, and is always aborted in the engine when its block is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from decoder_svc.answer import generation
from decoder_svc.answer.generated_text import TextIncrement
from decoder_svc.answer.generation import GenerationOptions, generating
from decoder_svc.engine.engine import Engine
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.prompt.preparation import PreparedRequest
from decoder_svc.prompt.sampling_check import SamplingLimits, SamplingSpec, check_sampling
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import CacheScope, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage
from decoder_svc.service import LoadedText
from lookonce import tracing
from lookonce.errors import InternalError, OverloadedError, UnavailableError
from lookonce.model.generation_defaults import GenerationDefaults
from tests.otlp_collector import Traces, traced_process

REQUEST = RequestId("r")
DEFAULTS = SamplingSpec()


class ScriptedStream(OutputStream):
    """Gives each output or error when it is asked for. Its end is the last one's, unless a test sets an earlier one."""

    def __init__(self, outputs: Sequence[RequestOutput | Exception]) -> None:
        super().__init__()
        self._scripted = iter(outputs)

    async def __anext__(self) -> RequestOutput:
        output = next(self._scripted, None)
        if output is None:
            raise StopAsyncIteration
        if isinstance(output, Exception):
            raise output
        return output


class ScriptedEngine(Engine):
    """Plays outputs to whoever submits, and notes which requests it is asked to end."""

    def __init__(self, outputs: Sequence[RequestOutput | Exception]) -> None:
        self.outputs = outputs
        self.aborted: list[tuple[RequestId, FinishReason]] = []

    def submit(self, *_: object, **__: object) -> OutputStream:
        if not self.outputs:
            raise OverloadedError("full")
        self.stream = ScriptedStream(self.outputs)
        return self.stream

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted.append((request_id, reason))


def output(*token_ids: int, reason: FinishReason | None = None, **usage: float) -> RequestOutput:
    record = RequestUsage(prompt_tokens=3, image_tokens=2, encoded_image_tokens=2)
    for name, value in usage.items():
        setattr(record, name, value)
    return RequestOutput(token_ids, (), reason, record)


def ids_of(text: LoadedText, words: str) -> list[int]:
    return list(text.tokenizer.backend.encode(words, add_special_tokens=False).ids)


def prepared(text: LoadedText, spec: SamplingSpec = DEFAULTS) -> PreparedRequest:
    checked = check_sampling(spec, GenerationDefaults(), SamplingLimits(text.vocab_size, 8, 8, 256))
    return PreparedRequest(Prompt((1, 2, 3)), checked.params, checked)


def options(age_s: float = 0.0) -> GenerationOptions:
    return GenerationOptions(priority=0, arrival_s=time.monotonic() - age_s, deadline_s=None, cache_scope=CacheScope())


async def run(
    engine: ScriptedEngine, text: LoadedText, spec: SamplingSpec = DEFAULTS
) -> tuple[list[TextIncrement], RequestUsage]:
    async with generating(engine, REQUEST, prepared(text, spec), options(), text.tokenizer) as submitted:
        await submitted.admission()
        return [increment async for increment in submitted.increments()], submitted.usage


async def test_admission_comes_first_and_carries_prompt_side_usage(llava_text: LoadedText) -> None:
    engine = ScriptedEngine([output(), output(5, reason=FinishReason.LENGTH)])
    async with generating(engine, REQUEST, prepared(llava_text), options(), llava_text.tokenizer) as submitted:
        usage = await submitted.admission()
        assert (usage.prompt_tokens, usage.encoded_image_tokens, usage.completion_tokens) == (3, 2, 0)
        increments = [increment async for increment in submitted.increments()]
        assert [increment.finish_reason for increment in increments] == [FinishReason.LENGTH]
        assert submitted.usage.completion_tokens == 1
    assert engine.aborted == [(REQUEST, FinishReason.LENGTH)]


async def test_a_request_that_is_ended_while_it_waits_has_an_answer(llava_text: LoadedText) -> None:
    engine = ScriptedEngine([output(reason=FinishReason.ABORT)])
    increments, usage = await run(engine, llava_text)
    assert [(one.text, one.token_ids, one.finish_reason) for one in increments] == [("", (), FinishReason.ABORT)]
    assert usage.completion_tokens == 0


async def test_many_tokens_at_once_are_taken_in_parts_and_the_loop_goes_on_between(llava_text: LoadedText) -> None:
    ids = (ids_of(llava_text, "one. two three") * 200)[:700]
    whole = RequestOutput(
        tuple(ids), (), FinishReason.LENGTH, RequestUsage(), tuple(index % 2 == 1 for index in range(700))
    )
    engine = ScriptedEngine([output(), whole])
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    increments, usage = await run(engine, llava_text)
    counting.cancel()
    assert num_turns >= 700 // 64
    assert max(len(one.token_ids) for one in increments) <= 64
    assert [token_id for one in increments for token_id in one.token_ids] == ids
    assert [one.finish_reason for one in increments[:-1]] == [None] * (len(increments) - 1)
    assert increments[-1].finish_reason is FinishReason.LENGTH
    assert (usage.completion_tokens, usage.accepted_draft_tokens) == (700, 350)
    one_by_one = ScriptedEngine([output(), *(output(one) for one in ids), output(reason=FinishReason.LENGTH)])
    alone, _ = await run(one_by_one, llava_text)
    assert "".join(one.text for one in increments) == "".join(one.text for one in alone)


async def test_the_time_of_a_late_reader_does_not_count_as_serving_time(llava_text: LoadedText) -> None:
    engine = ScriptedEngine([output(), output(5, reason=FinishReason.LENGTH)])
    request = options(age_s=600.0)
    async with generating(engine, REQUEST, prepared(llava_text), request, llava_text.tokenizer) as submitted:
        await submitted.admission()
        # The engine ended the request two seconds after its arrival. Its reader comes back ten minutes later.
        engine.stream._ended_s = request.arrival_s + 2.0
        assert [one.finish_reason async for one in submitted.increments()] == [FinishReason.LENGTH]
        assert submitted.served_s == pytest.approx(2.0 + 1.0)


async def test_a_stop_string_ends_the_request_in_the_engine_and_counts_no_token_after_it(
    llava_text: LoadedText,
) -> None:
    ids = ids_of(llava_text, "one. two three")
    engine = ScriptedEngine([output(), output(*ids, completion_tokens=len(ids)), output(6, reason=FinishReason.LENGTH)])
    increments, usage = await run(engine, llava_text, SamplingSpec(stop=(".",)))
    num_tokens = sum(len(increment.token_ids) for increment in increments)
    assert "".join(increment.text for increment in increments) == "one"
    assert increments[-1].finish_reason is FinishReason.STOP
    assert usage.completion_tokens == num_tokens < len(ids)
    assert engine.aborted == [(REQUEST, FinishReason.STOP)]


@pytest.mark.parametrize("failure", [UnavailableError("encoder away"), InternalError("internal error 7")])
async def test_a_failure_is_raised_and_the_engine_freed(llava_text: LoadedText, failure: Exception) -> None:
    engine = ScriptedEngine([output(), output(5), failure])
    with pytest.raises(type(failure)):
        await run(engine, llava_text)
    assert engine.aborted == [(REQUEST, FinishReason.ABORT)]


async def test_an_engine_that_says_nothing_more_is_an_internal_error(llava_text: LoadedText) -> None:
    engine = ScriptedEngine([output(), output(5)])
    with pytest.raises(InternalError, match="without an answer"):
        await run(engine, llava_text)


async def test_a_refused_submission_needs_no_abort(llava_text: LoadedText) -> None:
    engine = ScriptedEngine([])
    with pytest.raises(OverloadedError):
        await run(engine, llava_text)
    assert engine.aborted == []


async def test_a_cancelled_reader_frees_the_engine(llava_text: LoadedText) -> None:
    stream = OutputStream()

    class Endless(ScriptedEngine):
        def submit(self, *_: object, **__: object) -> OutputStream:
            return stream

    engine = Endless([])

    reader = asyncio.create_task(run(engine, llava_text))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert engine.aborted == [(REQUEST, FinishReason.ABORT)]


async def test_time_before_submission_counts_as_waiting(llava_text: LoadedText) -> None:
    engine = ScriptedEngine(
        [
            output(),
            output(5, reason=FinishReason.LENGTH, queue_time_s=0.5, time_to_first_token_s=1.0, completion_tokens=1),
        ]
    )
    async with generating(engine, REQUEST, prepared(llava_text), options(age_s=100), llava_text.tokenizer) as submitted:
        assert (await submitted.admission()).queue_time_s == 0
        assert [increment async for increment in submitted.increments()]
        assert submitted.usage.queue_time_s >= 100.5
        assert submitted.usage.time_to_first_token_s >= 101


async def test_time_after_submission_is_not_counted_twice(
    llava_text: LoadedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine works on the request already. On a busy machine this process may get its turn late."""
    now_s = 1000.0

    class LateEngine(ScriptedEngine):
        def submit(self, *arguments: object, **options: object) -> OutputStream:
            nonlocal now_s
            now_s += 10
            return super().submit(*arguments, **options)

    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now_s))
    engine = LateEngine([output(queue_time_s=0.5, time_to_first_token_s=1.0)])
    called = replace(options(), arrival_s=998.0)
    async with generating(engine, REQUEST, prepared(llava_text), called, llava_text.tokenizer) as submitted:
        assert (await submitted.admission()).queue_time_s == 2.5


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced_process() as started:
        yield started


async def test_a_trace_has_the_parts_of_a_request_with_the_engines_times(
    llava_text: LoadedText, traces: Traces
) -> None:
    admitted = output(queue_time_s=2.0)
    last = output(5, reason=FinishReason.LENGTH, queue_time_s=2.0, time_to_first_token_s=5.0)
    engine = ScriptedEngine([admitted, last])
    with tracing.calling("call"):
        async with generating(
            engine, REQUEST, prepared(llava_text), options(age_s=9.0), llava_text.tokenizer
        ) as submitted:
            await submitted.admission()
            _ = [increment async for increment in submitted.increments()]
    told = await asyncio.to_thread(traces.collected)
    took_s = {span.name: (span.ended_ns - span.started_ns) / 1e9 for span in told.spans if span.name != "call"}
    assert set(took_s) == {"generate.queue", "generate.prefill", "generate.decode"}
    assert took_s["generate.queue"] == pytest.approx(2.0, abs=1e-5)
    assert took_s["generate.prefill"] == pytest.approx(3.0, abs=1e-5)
    assert {span.parent_id for span in told.spans if span.name != "call"} == {told.one("call").span_id}
    assert told.one("generate.prefill").attributes == {
        "lookonce.prompt_tokens": 3,
        "lookonce.cached_prompt_tokens": 0,
        "lookonce.image_tokens": 2,
    }
    assert told.one("generate.decode").attributes == {"lookonce.completion_tokens": 1}


@pytest.mark.parametrize(
    ("outputs", "parts"),
    [
        ([UnavailableError("encoder away")], {"generate.queue"}),
        ([output(queue_time_s=0.5), UnavailableError("encoder away")], {"generate.queue", "generate.prefill"}),
    ],
)
async def test_a_trace_of_a_request_that_failed_has_the_parts_that_began(
    outputs: list[RequestOutput | Exception],
    parts: set[str],
    llava_text: LoadedText,
    traces: Traces,
) -> None:
    with pytest.raises(UnavailableError), tracing.calling("call"):
        await run(ScriptedEngine(outputs), llava_text)
    told = await asyncio.to_thread(traces.collected)
    assert {span.name for span in told.spans if span.name != "call"} == parts
