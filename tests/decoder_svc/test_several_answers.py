"""Several answers to one prompt: each is the one that its seed gives alone, and the prompt is computed once."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from lookonce import errors
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder, source
from tests.decoder_svc.encoders import running_encoder
from tests.decoder_svc.test_servicer import failure, generate, png, streamed, until_idle, with_fields

# Tests share decoders, so they share an event loop, too.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING: dict[str, Any] = {"temperature": 1.5, "seed": 40, "max_tokens": 24, "logprobs": 2}
# Settings under which the answers are computed in other ways: few places, small chunks, drafts.
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "one after the other": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 3},
    "drafts": {"speculative_tokens": 4, "speculative_ngram_min": 1},
    "few blocks": {"num_kv_blocks": 16, "max_context_tokens": 140},
}


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return model_folder("llava_clip")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def shared_decoder(folder: pathlib.Path, request: pytest.FixtureRequest) -> AsyncIterator[RunningDecoder]:
    async with (
        running_encoder(folder) as target,
        running_decoder(folder, target, dtype="float32", **WAYS[request.param]) as decoder,
    ):
        yield decoder


@pytest_asyncio.fixture(loop_scope="module")
async def decoder(shared_decoder: RunningDecoder) -> AsyncIterator[RunningDecoder]:
    """A decoder with each of `WAYS` in turn. No test leaves a request in it."""
    yield shared_decoder
    await until_idle(shared_decoder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_plain(folder: pathlib.Path) -> AsyncIterator[RunningDecoder]:
    async with (
        running_encoder(folder) as target,
        running_decoder(folder, target, dtype="float32", max_num_seqs=4, max_waiting_requests=4) as decoder,
    ):
        yield decoder


@pytest_asyncio.fixture(loop_scope="module")
async def plain(shared_plain: RunningDecoder) -> AsyncIterator[RunningDecoder]:
    """A decoder for four answers at a time, and as many that wait. No test leaves a request in it."""
    yield shared_plain
    await until_idle(shared_plain)


async def test_each_answer_is_the_one_of_its_seed(decoder: RunningDecoder) -> None:
    # No other test shows this picture.
    picture = source(png(100))
    several = await generate(decoder, params(picture, "what is it", n=4, **SAMPLING))
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in several.choices}) > 1
    for choice in several.choices:
        alone = await generate(decoder, params(picture, "what is it", **{**SAMPLING, "seed": 40 + choice.index}))
        expected = alone.choices[0]
        assert (choice.text, list(choice.token_ids)) == (expected.text, list(expected.token_ids))
        assert choice.finish_reason == expected.finish_reason
        for found, other in zip(choice.logprobs, expected.logprobs, strict=True):
            assert [entry.token_id for entry in found.top] == [entry.token_id for entry in other.top]
            assert [entry.logprob for entry in found.top] == pytest.approx(
                [entry.logprob for entry in other.top], abs=1e-4
            )
    usage, alone_usage = several.usage, alone.usage
    assert usage.prompt_tokens == alone_usage.prompt_tokens
    assert usage.completion_tokens == sum(len(choice.token_ids) for choice in several.choices)
    assert usage.image_tokens == usage.encoded_image_tokens + usage.cached_image_tokens + usage.skipped_image_tokens
    # The picture was new to the server, and one answer's prompt was computed.
    assert usage.encoded_image_tokens == usage.image_tokens
    assert usage.cached_prompt_tokens == 0


async def test_a_stream_has_the_same_answers_and_one_end_for_each(decoder: RunningDecoder) -> None:
    request = params(source(png(2)), "what is it", n=3, **SAMPLING)
    at_once = await generate(decoder, request)
    events = await streamed(decoder, request)
    assert [event.WhichOneof("event") for event in events].count("started") == 1
    assert events[0].HasField("started")
    texts, ids, ends = ["", "", ""], [[], [], []], []  # type: ignore[var-annotated]
    for event in events[1:]:
        if event.HasField("delta"):
            assert event.delta.token_index == len(ids[event.delta.index])
            assert event.delta.index not in ends
            texts[event.delta.index] += event.delta.text
            ids[event.delta.index] += event.delta.token_ids
        else:
            ends.append(event.finished.index)
    assert sorted(ends) == [0, 1, 2]
    assert texts == [choice.text for choice in at_once.choices]
    assert ids == [list(choice.token_ids) for choice in at_once.choices]
    assert events[-1].finished.usage.completion_tokens == at_once.usage.completion_tokens


async def test_an_answer_that_a_stop_string_ends_is_not_continued_for_the_others(plain: RunningDecoder) -> None:
    request = params("what is it", n=4, **{**SAMPLING, "max_tokens": 200, "temperature": 2.0})
    free = await generate(plain, request)
    # A text that is in one answer only.
    stop = free.choices[2].text[8:14]
    assert sum(stop in choice.text for choice in free.choices) == 1
    request.sampling.stop.append(stop)
    call = plain.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
    has_stopped, fewest = False, 4
    async for event in call:
        has_stopped |= event.HasField("finished") and event.finished.finish_reason == pb.FINISH_REASON_STOP
        if has_stopped and event.HasField("delta"):
            load = await plain.stub.GetLoad(pb.GetLoadRequest(), timeout=10)
            fewest = min(fewest, load.running_requests + load.waiting_requests)
    assert has_stopped
    assert fewest < 4


async def test_abort_ends_all_answers(plain: RunningDecoder) -> None:
    request = with_fields(params("what is it", n=3, **{**SAMPLING, "max_tokens": 1500}), request_id="mine")
    call = plain.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
    ends: list[pb.FinishReason.ValueType] = []
    async for event in call:
        if event.HasField("delta") and not ends:
            await plain.stub.AbortRequest(pb.AbortRequestRequest(request_id="mine"), timeout=10)
        if event.HasField("finished"):
            ends.append(event.finished.finish_reason)
    assert len(ends) == 3
    assert pb.FINISH_REASON_ABORT in ends
    await until_idle(plain)


async def test_a_cancelled_call_leaves_nothing_behind(plain: RunningDecoder) -> None:
    request = params("what is it", n=3, **{**SAMPLING, "max_tokens": 1500})
    call = plain.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
    await call.read()
    call.cancel()
    await until_idle(plain)
    # All places are free again.
    answer = await generate(plain, params("what is it", n=8, **SAMPLING))
    assert len(answer.choices) == 8


async def test_each_answer_takes_a_place(plain: RunningDecoder) -> None:
    error = await failure(generate(plain, params("what is it", n=9, **SAMPLING)))
    assert isinstance(error, errors.OverloadedError)
    request = params("what is it", n=6, **{**SAMPLING, "max_tokens": 1500})
    call = plain.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
    await call.read()
    assert isinstance(await failure(generate(plain, params("what", n=3))), errors.OverloadedError)
    assert len((await generate(plain, params("what", n=2, max_tokens=2))).choices) == 2
    call.cancel()
    await until_idle(plain)


@pytest.mark.parametrize("number", [0, 129])
async def test_the_number_of_answers_is_bounded(plain: RunningDecoder, number: int) -> None:
    error = await failure(generate(plain, params("what", n=number)))
    assert isinstance(error, errors.InvalidParameterError)
    assert error.field == "sampling.n"


async def test_answers_in_a_form_have_it(plain: RunningDecoder) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4})
    answer = await generate(plain, params("what", n=5, json_schema=schema, temperature=2.0, seed=1, max_tokens=60))
    values = [json.loads(choice.text) for choice in answer.choices]
    assert len({json.dumps(value) for value in values}) > 1
    assert all(isinstance(value, list) for value in values)


async def test_many_requests_with_several_answers_are_all_answered(decoder: RunningDecoder) -> None:
    async def one(index: int) -> pb.GenerateResponse:
        request = params(source(png(index % 3)), "what", n=1 + index % 4, **{**SAMPLING, "seed": index})
        while True:
            try:
                return await generate(decoder, request)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.05)

    answers = await asyncio.gather(*(one(index) for index in range(12)))
    assert [len(answer.choices) for answer in answers] == [1 + index % 4 for index in range(12)]
    assert all(choice.finish_reason for answer in answers for choice in answer.choices)
    await until_idle(decoder)


def mean_logprob(choice: pb.Choice) -> float:
    return sum(position.top[0].logprob for position in choice.logprobs) / len(choice.logprobs)


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_the_best_of_several_are_returned_in_order(plain: RunningDecoder, logprobs: int | None) -> None:
    options = {name: value for name, value in SAMPLING.items() if name != "logprobs"}
    every = await generate(plain, params("what is it", n=4, logprobs=1, **options))
    ranked = sorted(every.choices, key=mean_logprob, reverse=True)
    assert len({choice.text for choice in ranked}) > 2
    wanted = {} if logprobs is None else {"logprobs": logprobs}
    best = await generate(plain, params("what is it", n=2, best_of=4, **options, **wanted))
    assert [choice.index for choice in best.choices] == [0, 1]
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [list(choice.token_ids) for choice in best.choices] == [list(choice.token_ids) for choice in ranked[:2]]
    assert [bool(choice.logprobs) for choice in best.choices] == [logprobs is not None] * 2
    assert best.usage.completion_tokens == every.usage.completion_tokens
    all_ranked = await generate(plain, params("what is it", n=4, best_of=4, **options))
    assert [choice.text for choice in all_ranked.choices] == [choice.text for choice in ranked]
    one = await generate(plain, params("what is it", best_of=4, **options))
    assert [choice.text for choice in one.choices] == [ranked[0].text]


@pytest.mark.parametrize("sampling", [{"n": 3, "best_of": 2}, {"best_of": 129}, {"best_of": 0}])
async def test_best_of_is_checked(plain: RunningDecoder, sampling: dict[str, Any]) -> None:
    error = await failure(generate(plain, params("what is it", **sampling)))
    assert isinstance(error, errors.InvalidParameterError)
    assert error.field == "sampling.best_of"


async def test_a_stream_has_no_best_of(plain: RunningDecoder) -> None:
    error = await failure(streamed(plain, params("what is it", n=1, best_of=2)))
    assert isinstance(error, errors.InvalidParameterError)
    assert error.field == "sampling.best_of"
