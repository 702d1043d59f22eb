"""A request's life in the engine: one submission, one answer, and the engine rid of it whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest
from prometheus_client import CollectorRegistry

from decoder_svc.answer.generated_text import TextIncrement
from decoder_svc.answer.generation import GenerationOptions, generating
from decoder_svc.engine import engine_interface
from decoder_svc.engine.engine_interface import EngineCounters, EngineLimits, EngineLoad
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.prompt.generation_defaults import GenerationDefaults
from decoder_svc.prompt.preparation import PreparedRequest
from decoder_svc.prompt.sampling_check import SamplingLimits, SamplingSpec, check_sampling
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import CacheScope, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.service import LoadedText
from lookonce import tracing
from lookonce.errors import InternalError, OverloadedError, UnavailableError
from tests.otlp_collector import Traces, traced_process

REQUEST = RequestId("r")
DEFAULTS = SamplingSpec()


class ScriptedStream:
    """Gives each output when it is asked for; the engine's end is the last one's, unless a test says earlier."""

    ended_s: float | None = None

    def __init__(self, outputs: Sequence[RequestOutput | Exception]) -> None:
        self._outputs = outputs

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        for output in self._outputs:
            if isinstance(output, Exception):
                raise output
            yield output

    def when_ended(self, action: Callable[[], None]) -> None:
        """Nobody asks."""


class ScriptedEngine:
    """Plays outputs to whoever submits, and notes what it is asked to end."""

    limits = EngineLimits(100, 8, 10, 32, 4, 64, 64, 16)

    def __init__(self, outputs: Sequence[RequestOutput | Exception]) -> None:
        self.outputs = outputs
        self.aborted: list[tuple[RequestId, FinishReason]] = []
        self.deadlines_s: list[float | None] = []

    def submit(
        self,
        request_id: RequestId,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int,
        deadline_s: float | None,
        cache_scope: CacheScope,
    ) -> engine_interface.OutputStream:
        self.deadlines_s.append(deadline_s)
        if not self.outputs:
            raise OverloadedError("full")
        self.stream = ScriptedStream(self.outputs)
        return self.stream

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted.append((request_id, reason))

    @property
    def attention_backend(self) -> str:
        return "none"

    def load(self) -> EngineLoad:
        return EngineLoad(2, 1, 1, 0.25, 32)

    def counters(self) -> EngineCounters:
        return EngineCounters(preemptions=3, prefix_query_tokens=40, prefix_hit_tokens=30)


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
    engine: ScriptedEngine, text: LoadedText, registry: CollectorRegistry, spec: SamplingSpec = DEFAULTS
) -> tuple[list[TextIncrement], RequestUsage]:
    metrics = DecoderMetrics(registry)
    async with generating(engine, REQUEST, prepared(text, spec), options(), text.tokenizer, metrics) as generation:
        await generation.admission()
        return [increment async for increment in generation.increments()], generation.usage


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


async def test_admission_comes_first_and_carries_prompt_side_usage(
    llava_text: LoadedText, registry: CollectorRegistry
) -> None:
    engine = ScriptedEngine([output(), output(5, reason=FinishReason.LENGTH)])
    metrics = DecoderMetrics(registry)
    async with generating(
        engine, REQUEST, prepared(llava_text), options(), llava_text.tokenizer, metrics
    ) as generation:
        usage = await generation.admission()
        assert (usage.prompt_tokens, usage.encoded_image_tokens, usage.completion_tokens) == (3, 2, 0)
        increments = [increment async for increment in generation.increments()]
        assert [increment.finish_reason for increment in increments] == [FinishReason.LENGTH]
        assert generation.usage.completion_tokens == 1
    assert engine.aborted == [(REQUEST, FinishReason.LENGTH)]


async def test_who_is_ended_while_waiting_has_an_answer_all_the_same(
    llava_text: LoadedText, registry: CollectorRegistry
) -> None:
    engine = ScriptedEngine([output(reason=FinishReason.ABORT)])
    increments, usage = await run(engine, llava_text, registry)
    assert [(one.text, one.token_ids, one.finish_reason) for one in increments] == [("", (), FinishReason.ABORT)]
    assert usage.completion_tokens == 0


async def test_many_tokens_at_once_are_taken_in_parts_and_the_loop_goes_on_between(
    llava_text: LoadedText, registry: CollectorRegistry
) -> None:
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
    increments, usage = await run(engine, llava_text, registry)
    counting.cancel()
    assert num_turns >= 700 // 64
    assert max(len(one.token_ids) for one in increments) <= 64
    assert [token_id for one in increments for token_id in one.token_ids] == ids
    assert [one.finish_reason for one in increments[:-1]] == [None] * (len(increments) - 1)
    assert increments[-1].finish_reason is FinishReason.LENGTH
    assert (usage.completion_tokens, usage.accepted_draft_tokens) == (700, 350)
    alone, _ = await run(ScriptedEngine([output(), *(output(one) for one in ids), output(reason=FinishReason.LENGTH)]),
                         llava_text, CollectorRegistry())  # fmt: skip
    assert "".join(one.text for one in increments) == "".join(one.text for one in alone)


async def test_who_reads_late_was_not_served_long(llava_text: LoadedText, registry: CollectorRegistry) -> None:
    engine = ScriptedEngine([output(), output(5, reason=FinishReason.LENGTH)])
    metrics = DecoderMetrics(registry)
    request = options(age_s=600.0)
    async with generating(engine, REQUEST, prepared(llava_text), request, llava_text.tokenizer, metrics) as generation:
        await generation.admission()
        # The engine was done two seconds after the request had come; its caller came back ten minutes later.
        engine.stream.ended_s = request.arrival_s + 2.0
        assert [one.finish_reason async for one in generation.increments()] == [FinishReason.LENGTH]
        assert generation.served_s == pytest.approx(2.0 + 1.0)


async def test_a_stop_string_ends_the_request_in_the_engine_and_counts_no_token_after_it(
    llava_text: LoadedText, registry: CollectorRegistry
) -> None:
    ids = ids_of(llava_text, "one. two three")
    engine = ScriptedEngine([output(), output(*ids, completion_tokens=len(ids)), output(6, reason=FinishReason.LENGTH)])
    increments, usage = await run(engine, llava_text, registry, SamplingSpec(stop=(".",)))
    num_tokens = sum(len(increment.token_ids) for increment in increments)
    assert "".join(increment.text for increment in increments) == "one"
    assert increments[-1].finish_reason is FinishReason.STOP
    assert usage.completion_tokens == num_tokens < len(ids)
    assert engine.aborted == [(REQUEST, FinishReason.STOP)]


@pytest.mark.parametrize("failure", [UnavailableError("encoder away"), InternalError("internal error 7")])
async def test_a_failure_is_raised_and_the_engine_freed(
    llava_text: LoadedText, registry: CollectorRegistry, failure: Exception
) -> None:
    engine = ScriptedEngine([output(), output(5), failure])
    with pytest.raises(type(failure)):
        await run(engine, llava_text, registry)
    assert engine.aborted == [(REQUEST, FinishReason.ABORT)]


async def test_an_engine_that_says_nothing_more_is_an_internal_error(
    llava_text: LoadedText, registry: CollectorRegistry
) -> None:
    engine = ScriptedEngine([output(), output(5)])
    with pytest.raises(InternalError, match="without an answer"):
        await run(engine, llava_text, registry)


async def test_a_refused_submission_needs_no_abort(llava_text: LoadedText, registry: CollectorRegistry) -> None:
    engine = ScriptedEngine([])
    with pytest.raises(OverloadedError):
        await run(engine, llava_text, registry)
    assert engine.aborted == []


async def test_a_cancelled_reader_frees_the_engine(llava_text: LoadedText, registry: CollectorRegistry) -> None:
    stream = OutputStream()

    class Endless(ScriptedEngine):
        def submit(self, *_: object, **__: object) -> OutputStream:
            return stream

    engine = Endless([])

    reader = asyncio.create_task(run(engine, llava_text, registry))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert engine.aborted == [(REQUEST, FinishReason.ABORT)]


async def test_time_before_submission_counts_as_waiting(llava_text: LoadedText, registry: CollectorRegistry) -> None:
    engine = ScriptedEngine(
        [
            output(),
            output(5, reason=FinishReason.LENGTH, queue_time_s=0.5, time_to_first_token_s=1.0, completion_tokens=1),
        ]
    )
    async with generating(
        engine, REQUEST, prepared(llava_text), options(age_s=100), llava_text.tokenizer, DecoderMetrics(registry)
    ) as generation:
        assert (await generation.admission()).queue_time_s == 0
        assert [increment async for increment in generation.increments()]
        assert generation.usage.queue_time_s >= 100.5
        assert generation.usage.time_to_first_token_s >= 101
    assert registry.get_sample_value("lookonce_decoder_ttft_seconds_bucket", {"le": "60.0"}) == 0
    assert registry.get_sample_value("lookonce_decoder_ttft_seconds_count") == 1


async def test_metrics_count_what_ended(llava_text: LoadedText, registry: CollectorRegistry) -> None:
    metrics = DecoderMetrics(registry)
    last = output(5, 6, reason=FinishReason.LENGTH, cached_image_tokens=7, skipped_image_tokens=9)
    engine = ScriptedEngine([output(), last])
    metrics.watch(engine)
    for _ in range(2):
        async with generating(
            engine, REQUEST, prepared(llava_text), options(), llava_text.tokenizer, metrics
        ) as generation:
            await generation.admission()
            assert [increment async for increment in generation.increments()]
    expected = {
        ("lookonce_decoder_prompt_tokens_total", ""): 6,
        ("lookonce_decoder_generated_tokens_total", ""): 4,
        ("lookonce_decoder_image_rows_total", "encoded"): 4,
        ("lookonce_decoder_image_rows_total", "shared"): 14,
        ("lookonce_decoder_image_rows_total", "skipped"): 18,
        ("lookonce_decoder_running_requests", ""): 2,
        ("lookonce_decoder_waiting_requests", ""): 1,
        ("lookonce_decoder_kv_cache_usage", ""): 0.25,
        ("lookonce_decoder_preemptions_total", ""): 3,
        ("lookonce_decoder_prefix_cache_query_tokens_total", ""): 40,
        ("lookonce_decoder_prefix_cache_hit_tokens_total", ""): 30,
    }
    for (name, tier), value in expected.items():
        assert registry.get_sample_value(name, {"tier": tier} if tier else {}) == value, name


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced_process() as started:
        yield started


async def test_a_trace_has_the_parts_of_a_request_with_the_engines_times(
    llava_text: LoadedText, registry: CollectorRegistry, traces: Traces
) -> None:
    admitted = output(queue_time_s=2.0)
    last = output(5, reason=FinishReason.LENGTH, queue_time_s=2.0, time_to_first_token_s=5.0)
    engine = ScriptedEngine([admitted, last])
    metrics = DecoderMetrics(registry)
    with tracing.calling("call"):
        async with generating(
            engine, REQUEST, prepared(llava_text), options(age_s=9.0), llava_text.tokenizer, metrics
        ) as generation:
            await generation.admission()
            _ = [increment async for increment in generation.increments()]
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
    registry: CollectorRegistry,
    traces: Traces,
) -> None:
    with pytest.raises(UnavailableError), tracing.calling("call"):
        await run(ScriptedEngine(outputs), llava_text, registry)
    told = await asyncio.to_thread(traces.collected)
    assert {span.name for span in told.spans if span.name != "call"} == parts
