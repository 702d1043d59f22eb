"""The decoder's calls at the gRPC level: a real server, the real engine on a tiny model, a real encoder."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import pathlib
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch

from lookonce import errors, status_codes
from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests import image_files, tiny_models
from tests.decoder_svc.decoders import RunningDecoder, chat, params, reference, running_decoder, source
from tests.decoder_svc.encoders import running_encoder
from tests.rust_panic import GOOD_TEXT, PANICKING_TEXT, change_tokenizer, with_short_table

# Most tests share two decoders, so they share an event loop, too.
pytestmark = pytest.mark.asyncio(loop_scope="module")

INTERNALS = re.compile(r"0x[0-9a-f]{6,}|Traceback|site-packages|\.py\b|127\.0\.0\.1|/tmp|jinja|tokenizers")
LIMITS: dict[str, Any] = {
    "max_images_per_prompt": 3,
    "max_image_bytes": 200_000,
    "max_image_pixels": 1_000_000,
    "max_stop_strings": 2,
    "max_logprobs": 5,
}
DEFAULT_TIMEOUT_S = 0.3
# Each test that counts encodes or reads their log lines needs pictures that the shared encoder has not seen.
_new_seeds = itertools.count(1000)


def png(seed: int, width: int = 80, height: int = 60) -> bytes:
    return image_files.encoded(image_files.noise(seed, width, height))


def new_png() -> bytes:
    """A picture that no other test shows."""
    return png(next(_new_seeds))


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return model_folder("llava_clip")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_decoder(folder: pathlib.Path) -> AsyncIterator[RunningDecoder]:
    async with (
        running_encoder(folder) as target,
        running_decoder(folder, target, **LIMITS) as decoder,
    ):
        yield decoder


@pytest_asyncio.fixture(loop_scope="module")
async def decoder(shared_decoder: RunningDecoder) -> AsyncIterator[RunningDecoder]:
    """A decoder with its encoder, without a shared cache. No test leaves a request in it."""
    yield shared_decoder
    await until_idle(shared_decoder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_narrow(folder: pathlib.Path) -> AsyncIterator[RunningDecoder]:
    async with running_decoder(folder, default_timeout_s=DEFAULT_TIMEOUT_S, max_num_seqs=1) as decoder:
        yield decoder


@pytest_asyncio.fixture(loop_scope="module")
async def narrow(shared_narrow: RunningDecoder) -> AsyncIterator[RunningDecoder]:
    """A decoder for one request at a time, with a short default deadline. No test leaves a request in it."""
    yield shared_narrow
    await until_idle(shared_narrow)


async def generate(decoder: RunningDecoder, request: pb.GenerateParams, **options: Any) -> pb.GenerateResponse:
    return await decoder.stub.Generate(pb.GenerateRequest(params=request), timeout=60, **options)


async def failure(call: Any) -> errors.LookonceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return status_codes.from_rpc_error(caught.value)


async def streamed(decoder: RunningDecoder, request: pb.GenerateParams) -> list[pb.GenerateStreamResponse]:
    call = decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
    return [event async for event in call]


async def until_idle(decoder: RunningDecoder) -> pb.GetLoadResponse:
    while True:
        load = await decoder.stub.GetLoad(pb.GetLoadRequest(), timeout=10)
        if not load.running_requests and not load.waiting_requests and load.kv_cache_usage == 0:
            return load
        await asyncio.sleep(0.01)


# Generate and GenerateStream.


@pytest.mark.parametrize("name", sorted(tiny_models.BUILDERS))
async def test_answers_are_those_of_hugging_face(model_folder: Callable[[str], pathlib.Path], name: str) -> None:
    folder = model_folder(name)
    processor, model = tiny_models.load_processor(folder), tiny_models.load_model(folder)
    async with running_encoder(folder) as target, running_decoder(folder, target) as decoder:
        for sizes in [[], [(80, 60)], [(90, 120), (200, 60)]]:
            pictures = [image_files.noise(seed, *size) for seed, size in enumerate(sizes)]
            content = [{"type": "image"}] * len(sizes) + [{"type": "text", "text": "what is in it"}]
            rendered = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            inputs = processor(
                images=pictures or None,
                text=rendered,
                add_special_tokens=not rendered.startswith(processor.tokenizer.bos_token or "\0"),
                return_tensors="pt",
            )
            with torch.inference_mode():
                expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)[
                    0, inputs["input_ids"].shape[1] :
                ]
            parts = [source(image_files.encoded(picture)) for picture in pictures]
            response = await generate(decoder, params(*parts, "what is in it", max_tokens=12))
            assert list(response.choices[0].token_ids) == expected.tolist()
            assert response.choices[0].text == processor.tokenizer.decode(expected, skip_special_tokens=True)
            assert response.usage.prompt_tokens == inputs["input_ids"].shape[1]


async def test_the_stream_gives_the_same_answer_as_generate(decoder: RunningDecoder) -> None:
    request = params(source(png(1)), "what", max_tokens=20, logprobs=2, ignore_eos=True)
    whole = await generate(decoder, request)
    events = await streamed(decoder, request)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    deltas = [event.delta for event in events[1:-1]]
    choice = whole.choices[0]
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(choice.token_ids)
    next_index = 0
    for delta in deltas:
        assert delta.token_index == next_index
        assert len(delta.logprobs) == len(delta.token_ids)
        next_index += len(delta.token_ids)
    assert next_index == len(choice.token_ids) == len(choice.logprobs) == 20
    assert [position.top[0].token_id for position in choice.logprobs] == list(choice.token_ids)
    finished = events[-1].finished
    assert finished.finish_reason == choice.finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.completion_tokens == whole.usage.completion_tokens == 20
    assert events[0].started.usage.prompt_tokens == whole.usage.prompt_tokens
    assert finished.usage.time_to_first_token.ToNanoseconds() >= finished.usage.queue_time.ToNanoseconds() > 0


async def test_usage_counts_rows_by_their_source(decoder: RunningDecoder) -> None:
    def num_encoded() -> float:
        return decoder.registry.get_sample_value("lookonce_decoder_image_rows_total", {"tier": "encoded"}) or 0.0

    request, before = params(source(new_png()), "what", max_tokens=2, ignore_eos=True), num_encoded()
    first, second = await generate(decoder, request), await generate(decoder, request)
    assert (first.usage.image_tokens, first.usage.encoded_image_tokens) == (16, 16)
    assert (second.usage.image_tokens, second.usage.encoded_image_tokens) == (16, 0)
    assert first.choices[0].text == second.choices[0].text
    assert num_encoded() - before == 16


async def test_a_stop_string_ends_the_answer_and_does_not_show(decoder: RunningDecoder) -> None:
    text = (await generate(decoder, params("tell", max_tokens=30, ignore_eos=True))).choices[0].text
    stop = text[6:9]
    request = params("tell", max_tokens=30, ignore_eos=True, stop=[stop])
    request.request_id = "again"
    for _ in range(3):
        response = await generate(decoder, request)
        assert response.choices[0].text == text[: text.index(stop)]
        assert response.choices[0].finish_reason == pb.FINISH_REASON_STOP
        assert response.usage.completion_tokens == len(response.choices[0].token_ids) <= 30
    await until_idle(decoder)


async def test_the_same_seed_gives_the_same_answer_and_another_one_another(decoder: RunningDecoder) -> None:
    def request(seed: int) -> pb.GenerateParams:
        return params("tell", max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True)

    answers = [(await generate(decoder, request(seed))).choices[0].text for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


async def test_requests_at_the_same_time_do_not_disturb_each_other(decoder: RunningDecoder) -> None:
    requests = [
        params(*([source(png(seed))] if seed % 2 else []), "what is " + "it " * seed, max_tokens=8) for seed in range(8)
    ]
    alone = [(await generate(decoder, request)).choices[0].text for request in requests]
    together = await asyncio.gather(*(generate(decoder, request) for request in requests))
    assert [response.choices[0].text for response in together] == alone


async def test_a_max_tokens_that_is_not_stated_ends_with_the_context(folder: pathlib.Path) -> None:
    async with running_decoder(folder, max_context_tokens=40) as decoder:
        tokens = pb.TokenPrompt(token_ids=[20] * 37)
        request = pb.GenerateParams(tokens=tokens, sampling=pb.SamplingParams(ignore_eos=True))
        assert (await generate(decoder, request)).usage.completion_tokens == 3
        request.sampling.max_tokens = 4
        assert isinstance(await failure(generate(decoder, request)), errors.ContextTooLongError)


# References by digest.


async def test_a_digest_is_refused_until_the_image_was_sent_once(decoder: RunningDecoder) -> None:
    known, unknown = new_png(), new_png()
    answer = await generate(decoder, params(source(known), "what", max_tokens=4))
    by_digest = await generate(decoder, params(reference(image_digest(known)), "what", max_tokens=4))
    assert by_digest.choices[0].text == answer.choices[0].text
    parts = (reference(image_digest(unknown)), reference(image_digest(known)), reference(bytes(32)))
    missing = await failure(generate(decoder, params(*parts, "what")))
    assert isinstance(missing, errors.EmbeddingNotCachedError)
    assert missing.indexes == (0, 2)


async def test_without_the_encoder_text_is_answered_and_images_are_unavailable(folder: pathlib.Path) -> None:
    async with AsyncExitStack() as stack:
        encoder = AsyncExitStack()
        target = await encoder.enter_async_context(running_encoder(folder))
        decoder = await stack.enter_async_context(running_decoder(folder, target))
        await generate(decoder, params(source(png(5)), "what", max_tokens=2))
        await encoder.aclose()
        assert (await generate(decoder, params("what", max_tokens=2))).choices
        error = await failure(generate(decoder, params(source(png(6)), "what")))
        assert isinstance(error, errors.UnavailableError)
        assert not INTERNALS.search(error.message)
        await until_idle(decoder)


# Tokenize, Detokenize, GetModelInfo, GetLoad.


async def test_tokenize_shows_the_prompt_that_generate_sees(decoder: RunningDecoder) -> None:
    data = png(7)
    tokenized = await decoder.stub.Tokenize(pb.TokenizeRequest(chat=chat("see", source(data), "what")))
    (image,) = tokenized.images
    info = await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert image.length == 16
    assert len(set(tokenized.token_ids[image.offset : image.offset + 16])) == 1
    assert image.key == common_pb2.ContentKey(
        digest=image_digest(data),
        algorithm=common_pb2.HASH_ALGORITHM_SHA256,
        encoder_fingerprint=info.encoder_fingerprint,
    )
    request = pb.GenerateParams(sampling=pb.SamplingParams(max_tokens=5))
    request.tokens.token_ids.extend(tokenized.token_ids)
    request.tokens.images.append(source(data))
    from_chat = await generate(decoder, params("see", source(data), "what", max_tokens=5))
    assert (await generate(decoder, request)).choices[0].token_ids == from_chat.choices[0].token_ids


async def test_tokenize_and_detokenize_text_without_an_encoder(folder: pathlib.Path) -> None:
    async with running_decoder(folder) as decoder:
        tokenized = await decoder.stub.Tokenize(pb.TokenizeRequest(text=pb.TextPrompt(text="what ☃ is it</s>")))
        text = (await decoder.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids))).text
        assert text == "<s>what ☃ is it</s>"
        error = await failure(decoder.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5, 4_000_000])))
        assert isinstance(error, errors.InvalidParameterError)
        assert (await decoder.stub.Detokenize(pb.DetokenizeRequest())).text == ""
        each = await decoder.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids, separately=True))
        assert each.text == ""
        assert [len(each.token_texts), each.token_texts[0]] == [len(tokenized.token_ids), "<s>"]
        assert "".join(each.token_texts[1:]).startswith("what")
        too_many = await failure(decoder.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * 2001)))
        assert isinstance(too_many, errors.ContextTooLongError)


async def test_model_info_describes_the_served_model(decoder: RunningDecoder, folder: pathlib.Path) -> None:
    info = await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.model_type, info.image_placeholder) == (folder.name, "llava", "<image>")
    assert (info.max_context_tokens, info.block_size, info.num_kv_blocks) == (2000, 16, 200)
    assert (info.max_images_per_prompt, info.max_rows_per_image, info.vocab_size) == (3, 16, 1024)
    assert re.fullmatch("[0-9a-f]{64}", info.encoder_fingerprint)
    assert info.encoder_target
    assert info.version


async def test_model_info_is_there_while_the_encoder_is_not(folder: pathlib.Path) -> None:
    async with running_decoder(folder, "127.0.0.1:1") as decoder:
        info = await decoder.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
        assert (info.model_type, info.encoder_fingerprint) == ("llava", "")


# Ending requests.


async def begun(call: Any) -> list[pb.GenerateStreamResponse]:
    """The events up to the first delta."""
    return [await call.read(), await call.read()]


async def rest(call: Any) -> list[pb.GenerateStreamResponse]:
    """The remaining events of a stream."""
    events: list[pb.GenerateStreamResponse] = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def endless(request_id: str = "") -> pb.GenerateStreamRequest:
    request = params("tell", max_tokens=1500, ignore_eos=True)
    request.request_id = request_id
    return pb.GenerateStreamRequest(params=request)


async def test_images_of_waiting_requests_are_bounded_and_shared_by_tenants(folder: pathlib.Path) -> None:
    def asked(to: RunningDecoder, seed: int, tenant: str) -> Any:
        request = params("what is it", source(png(seed)), max_tokens=2)
        metadata = [("x-lookonce-tenant", tenant)]
        return to.stub.GenerateStream(pb.GenerateStreamRequest(params=request), metadata=metadata, timeout=60)

    size = max(len(png(seed)) for seed in range(8))
    async with (
        running_encoder(folder) as target,
        running_decoder(folder, target, max_num_seqs=1, max_queued_bytes=10 * size) as decoder,
    ):
        shares = decoder.service.servicer._gate._shares
        running = decoder.stub.GenerateStream(endless(), timeout=60)
        await begun(running)
        waiting: list[Any] = []
        for seed in range(5):
            before = shares.num_bytes
            waiting.append(asked(decoder, seed, "a"))
            while shares.num_bytes == before:
                await asyncio.sleep(0.01)
        assert isinstance(await failure(asked(decoder, 5, "a").read()), errors.OverloadedError)
        waiting.append(asked(decoder, 6, "b"))
        running.cancel()
        waiting.pop(0).cancel()
        for call in waiting:
            assert len(await rest(call)) > 1
        await until_idle(decoder)
        assert shares.num_bytes == 0
        assert len(await rest(asked(decoder, 7, "a"))) > 1


async def test_a_cancelled_call_frees_the_engine(decoder: RunningDecoder) -> None:
    call = decoder.stub.GenerateStream(endless(), timeout=60)
    await begun(call)
    assert (await decoder.stub.GetLoad(pb.GetLoadRequest())).running_requests == 1
    call.cancel()
    await until_idle(decoder)


async def test_a_passed_deadline_frees_the_engine(decoder: RunningDecoder) -> None:
    error = await failure(decoder.stub.Generate(pb.GenerateRequest(params=endless().params), timeout=0.3))
    assert isinstance(error, errors.DeadlineError)
    await until_idle(decoder)


async def endless_without_a_deadline(decoder: RunningDecoder, is_streamed: bool) -> Any:
    if is_streamed:
        return await rest(decoder.stub.GenerateStream(endless()))
    return await decoder.stub.Generate(pb.GenerateRequest(params=endless().params))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_without_a_deadline_ends_at_the_default_and_frees_the_engine(
    narrow: RunningDecoder, is_streamed: bool
) -> None:
    error = await failure(endless_without_a_deadline(narrow, is_streamed))
    assert isinstance(error, errors.DeadlineError)
    assert f"{DEFAULT_TIMEOUT_S} s, the server's default" in error.message
    load = await until_idle(narrow)
    assert load.kv_cache_usage == 0
    assert narrow.service.engine.load().live_requests == 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_without_a_deadline_that_waits_for_its_turn_ends_at_the_default(
    narrow: RunningDecoder, is_streamed: bool
) -> None:
    first = narrow.stub.GenerateStream(endless(), timeout=60)
    await begun(first)
    error = await failure(endless_without_a_deadline(narrow, is_streamed))
    assert isinstance(error, errors.DeadlineError)
    first.cancel()
    await until_idle(narrow)


async def test_a_call_s_own_deadline_counts_instead_of_the_default(folder: pathlib.Path) -> None:
    long = params("tell", max_tokens=200, ignore_eos=True)
    async with running_decoder(folder, default_timeout_s=0.01) as decoder:
        assert len(await streamed(decoder, long)) > 2
        response = await generate(decoder, long)
        assert response.usage.completion_tokens == 200


async def test_without_a_default_a_call_without_a_deadline_is_answered(folder: pathlib.Path) -> None:
    async with running_decoder(folder, default_timeout_s=0) as decoder:
        long = params("tell", max_tokens=200, ignore_eos=True)
        response = await decoder.stub.Generate(pb.GenerateRequest(params=long))
        assert response.usage.completion_tokens == 200
        assert decoder.service.default_timeouts_s == {}


async def test_abort_ends_a_stream_with_its_reason_and_unknown_ids_are_ignored(decoder: RunningDecoder) -> None:
    call = decoder.stub.GenerateStream(endless("mine"), timeout=60)
    events = await begun(call)
    for request_id in ("unknown", "mine", "mine", ""):
        await decoder.stub.AbortRequest(pb.AbortRequestRequest(request_id=request_id))
    events += await rest(call)
    assert events[0].started.request_id == "mine"
    assert events[-1].finished.finish_reason == pb.FINISH_REASON_ABORT
    num_tokens = sum(len(event.delta.token_ids) for event in events)
    assert events[-1].finished.usage.completion_tokens == num_tokens < 1500
    await until_idle(decoder)


async def test_an_id_is_taken_while_its_request_lives_and_free_afterwards(decoder: RunningDecoder) -> None:
    call = decoder.stub.GenerateStream(endless("mine"), timeout=60)
    await begun(call)
    error = await failure(generate(decoder, endless("mine").params))
    assert isinstance(error, errors.InvalidParameterError)
    assert error.field == "request_id"
    await decoder.stub.AbortRequest(pb.AbortRequestRequest(request_id="mine"))
    assert await rest(call)
    again = params("what", max_tokens=2)
    again.request_id = "mine"
    assert (await generate(decoder, again)).request_id == "mine"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_abort_of_a_request_that_waits_is_its_answer(narrow: RunningDecoder, is_streamed: bool) -> None:
    first = narrow.stub.GenerateStream(endless("first"), timeout=60)
    await begun(first)
    waiting = endless("second")
    answer: asyncio.Task[Any] = asyncio.create_task(
        rest(narrow.stub.GenerateStream(waiting, timeout=60)) if is_streamed else generate(narrow, waiting.params)
    )
    async with asyncio.timeout(30):
        while not (await narrow.stub.GetLoad(pb.GetLoadRequest())).waiting_requests:
            await asyncio.sleep(0.01)
    await narrow.stub.AbortRequest(pb.AbortRequestRequest(request_id="second"))
    found = await answer
    if is_streamed:
        assert [event.WhichOneof("event") for event in found] == ["started", "finished"]
        assert found[-1].finished.finish_reason == pb.FINISH_REASON_ABORT
    else:
        assert found.choices[0].finish_reason == pb.FINISH_REASON_ABORT
        assert not found.choices[0].token_ids
    await narrow.stub.AbortRequest(pb.AbortRequestRequest(request_id="first"))
    assert (await rest(first))[-1].finished.finish_reason == pb.FINISH_REASON_ABORT
    await until_idle(narrow)


MANY: dict[str, tuple[pb.GenerateParams, type[errors.LookonceError], str]] = {
    "parts": (pb.GenerateParams(chat=chat(*[""] * 5000)), errors.InvalidParameterError, "chat.messages"),
    "messages": (
        pb.GenerateParams(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER)] * 5000)),
        errors.InvalidParameterError,
        "chat.messages",
    ),
    "frames": (
        pb.GenerateParams(
            chat=pb.ChatPrompt(
                messages=[
                    pb.ChatMessage(
                        role=pb.ROLE_USER,
                        parts=[pb.ContentPart(video=pb.VideoSource(frames=[source(b"")] * 10))] * 500,
                    )
                ]
            )
        ),
        errors.InvalidParameterError,
        "chat.messages",
    ),
    "ids": (pb.GenerateParams(tokens=pb.TokenPrompt(token_ids=[5] * 2001)), errors.ContextTooLongError, ""),
    "images": (
        pb.GenerateParams(text=pb.TextPrompt(text="a", images=[reference(bytes(32))] * 5000)),
        errors.InvalidParameterError,
        "text.images",
    ),
    "stop strings": (params("what", stop=["a"] * 5000), errors.InvalidParameterError, "sampling.stop"),
    "stop ids": (params("what", stop_token_ids=[1] * 2000), errors.InvalidParameterError, "sampling.stop_token_ids"),
    "biases": (
        params("what", logit_bias=dict.fromkeys(range(2000), 1.0)),
        errors.InvalidParameterError,
        "sampling.logit_bias",
    ),
}


@pytest.mark.parametrize("name", list(MANY))
async def test_far_too_many_elements_are_refused_before_they_are_parsed(
    decoder: RunningDecoder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, kind, field = MANY[name]

    def looked_at(*_: Any) -> Any:
        raise AssertionError("nobody looks at single elements")

    monkeypatch.setattr("decoder_svc.wire_request._part", looked_at)
    monkeypatch.setattr("decoder_svc.wire_request._image", looked_at)
    error = await failure(generate(decoder, request))
    assert type(error) is kind
    assert getattr(error, "field", "") == field


@pytest.mark.parametrize("extreme", [{"temperature": 1e-40}, {"temperature": 1.0, "repetition_penalty": 1e-40}])
async def test_extreme_sampling_values_are_answered_and_fail_no_other_request(
    decoder: RunningDecoder, extreme: dict[str, float]
) -> None:
    wanted = (await generate(decoder, params("what", max_tokens=6, temperature=0.0))).choices[0]
    for top_p in (1.0, 0.9, 0.9, 0.9):
        beside = asyncio.create_task(generate(decoder, params("what", max_tokens=6, temperature=0.0)))
        answer = await generate(decoder, params("what", max_tokens=6, top_p=top_p, **extreme))
        assert len(answer.choices[0].token_ids) == 6
        assert (await beside).choices[0] == wanted
        if "repetition_penalty" not in extreme:
            assert answer.choices[0].token_ids == wanted.token_ids


async def test_requests_without_id_get_their_own(decoder: RunningDecoder) -> None:
    responses = [await generate(decoder, params("what", max_tokens=1)) for _ in range(2)]
    assert len({response.request_id for response in responses} - {""}) == 2


LogLines: TypeAlias = Callable[[], list[dict[str, Any]]]


async def access_lines(log_lines: LogLines, method: str, request_id: str | None = None) -> list[dict[str, Any]]:
    """Waits for access lines of a method, and of a request if one is named: a caller may have its answer before."""

    def found() -> list[dict[str, Any]]:
        lines = [line for line in log_lines() if line["event"] == "rpc" and line["method"].endswith("/" + method)]
        return [line for line in lines if request_id in (None, line["request_id"])]

    async with asyncio.timeout(60):
        while not found():
            await asyncio.sleep(0.01)
    return found()


async def answered_id(call: Any, log_lines: LogLines) -> str:
    """Reads a call to its end and returns its id in the answer, which must be that of the trailers and the log."""
    if isinstance(call, grpc.aio.UnaryUnaryCall):
        method, request_id = "Generate", (await call).request_id
    else:
        method, request_id = "GenerateStream", (await rest(call))[0].started.request_id
    assert dict(await call.trailing_metadata())["x-request-id"] == request_id
    assert [line["code"] for line in await access_lines(log_lines, method, request_id)] == ["OK"]
    return str(request_id)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("chosen", "metadata", "expected"),
    [
        ("order:" + "7" * 100, (), "order:" + "7" * 100),
        ("mine", (("x-request-id", "theirs"),), "mine"),
        ("", (("x-request-id", "a:" + "b" * 126),), "a:" + "b" * 126),
        ("", (("x-request-id", "no spaces"),), None),
        ("", (), None),
    ],
    ids=["chosen", "chosen before metadata", "metadata", "malformed metadata", "none"],
)
async def test_a_request_has_one_id_in_answer_and_logs_of_both_services(
    decoder: RunningDecoder,
    log_lines: LogLines,
    is_streamed: bool,
    chosen: str,
    metadata: tuple[tuple[str, str], ...],
    expected: str | None,
) -> None:
    request = params(source(new_png()), "what", max_tokens=2)
    request.request_id = chosen
    call: Any = (
        decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60, metadata=metadata)
        if is_streamed
        else decoder.stub.Generate(pb.GenerateRequest(params=request), timeout=60, metadata=metadata)
    )
    request_id = await answered_id(call, log_lines)
    assert expected in (None, request_id)
    encodes = await access_lines(log_lines, "Encode")
    assert {line["request_id"] for line in encodes} == {request_id}


async def test_a_call_whose_id_another_request_has_gets_a_new_one(decoder: RunningDecoder, log_lines: LogLines) -> None:
    session = (("x-request-id", "session"),)
    first = decoder.stub.GenerateStream(endless(), timeout=60, metadata=session)
    assert (await begun(first))[0].started.request_id == "session"
    beside = pb.GenerateRequest(params=params("what", max_tokens=2))
    second = await answered_id(decoder.stub.Generate(beside, timeout=60, metadata=session), log_lines)
    assert second != "session"
    (line,) = await access_lines(log_lines, "Generate")
    assert (line["request_id"], line["call_id"]) == (second, "session")
    await decoder.stub.AbortRequest(pb.AbortRequestRequest(request_id="session"))
    assert (await rest(first))[-1].finished.finish_reason == pb.FINISH_REASON_ABORT
    third = await answered_id(decoder.stub.Generate(beside, timeout=60, metadata=session), log_lines)
    assert third == "session", "free again"


async def test_a_refused_request_has_its_chosen_id_in_log_and_trailers(
    decoder: RunningDecoder, log_lines: LogLines
) -> None:
    request = params("what", max_tokens=2, temperature=-1.0)
    request.request_id = "mine"
    call = decoder.stub.Generate(pb.GenerateRequest(params=request), timeout=60)
    assert isinstance(await failure(call), errors.InvalidParameterError)
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
    (line,) = await access_lines(log_lines, "Generate")
    assert (line["request_id"], line["code"]) == ("mine", "INVALID_ARGUMENT")


# Bad input gets its status without internals, and does not disturb the next request.

NAN, INF = math.nan, math.inf
INVALID = errors.InvalidParameterError


def with_fields(request: pb.GenerateParams, **fields: Any) -> pb.GenerateParams:
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def text_prompt(text: str, *images: common_pb2.ImageSource) -> pb.GenerateParams:
    return pb.GenerateParams(text=pb.TextPrompt(text=text, images=images))


def token_prompt(*token_ids: int, images: int = 0) -> pb.GenerateParams:
    return pb.GenerateParams(tokens=pb.TokenPrompt(token_ids=token_ids, images=[source(png(1))] * images))


BAD: dict[str, tuple[pb.GenerateParams, type[errors.LookonceError]]] = {
    "no prompt": (pb.GenerateParams(), INVALID),
    "no message": (pb.GenerateParams(chat=pb.ChatPrompt()), errors.PromptEmptyError),
    "no part": (params(), INVALID),
    "no role": (pb.GenerateParams(chat=pb.ChatPrompt(messages=[pb.ChatMessage()])), INVALID),
    "empty part": (
        pb.GenerateParams(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER, parts=[pb.ContentPart()])])),
        INVALID,
    ),
    "assistant last": (
        pb.GenerateParams(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_ASSISTANT, parts=[pb.ContentPart(text="a")])])
        ),
        INVALID,
    ),
    "empty text": (text_prompt(""), errors.PromptEmptyError),
    "no token": (pb.GenerateParams(tokens=pb.TokenPrompt()), errors.PromptEmptyError),
    "token out of vocabulary": (token_prompt(1, 1024), INVALID),
    "prompt over the context": (token_prompt(*[20] * 2000), errors.ContextTooLongError),
    "prompt and max_tokens over the context": (params("what", max_tokens=1999), errors.ContextTooLongError),
    "huge max_tokens": (params("what", max_tokens=2**32 - 1), errors.ContextTooLongError),
    "more images than allowed": (params(*[source(png(1))] * 4, "what"), errors.ImageCountError),
    "placeholder without image": (text_prompt("see <image>"), errors.ImageCountError),
    "image without placeholder": (text_prompt("see", source(png(1))), errors.ImageCountError),
    "wrong run of placeholders": (token_prompt(20, *[3] * 15, images=1), errors.PlaceholderMismatchError),
    "no image": (params(source(b"no image"), "what"), errors.ImageUndecodableError),
    "empty image": (params(source(b""), "what"), errors.ImageUndecodableError),
    "image without source": (params(common_pb2.ImageSource(), "what"), INVALID),
    "truncated image": (params(source(png(1)[:300]), "what"), errors.ImageUndecodableError),
    "too many bytes": (params(source(bytes(200_001)), "what"), errors.ImageTooLargeError),
    "too many pixels": (params(source(image_files.png_of_size(9000, 9000)), "what"), errors.ImageTooLargeError),
    "digest mismatch": (params(source(png(1), expected_digest=bytes(32)), "what"), errors.DigestMismatchError),
    "short expected digest": (params(source(png(1), expected_digest=b"a"), "what"), INVALID),
    "short digest": (params(reference(b"a"), "what"), INVALID),
    "unknown digest": (params(reference(bytes(32)), "what"), errors.EmbeddingNotCachedError),
    "other algorithm": (
        params(
            common_pb2.ImageSource(
                key=common_pb2.ContentKey(digest=bytes(32), algorithm=common_pb2.HASH_ALGORITHM_BLAKE3)
            ),
            "what",
        ),
        INVALID,
    ),
    "other encoder": (
        params(
            common_pb2.ImageSource(key=common_pb2.ContentKey(digest=bytes(32), encoder_fingerprint="0" * 64)), "what"
        ),
        errors.FingerprintMismatchError,
    ),
    "max_pixels": (params(source(png(1), max_pixels=5000), "what"), INVALID),
    "no max_pixels": (params(source(png(1), max_pixels=0), "what"), INVALID),
    "temperature": (params("what", temperature=-0.1), INVALID),
    "temperature NaN": (params("what", temperature=NAN), INVALID),
    "top_p": (params("what", top_p=0.0), INVALID),
    "top_p Inf": (params("what", top_p=INF), INVALID),
    "min_p": (params("what", min_p=1.1), INVALID),
    "repetition_penalty": (params("what", repetition_penalty=0.0), INVALID),
    "presence_penalty": (params("what", presence_penalty=3.0), INVALID),
    "frequency_penalty": (params("what", frequency_penalty=-3.0), INVALID),
    "logit_bias": (params("what", logit_bias={5: NAN}), INVALID),
    "logit_bias id": (params("what", logit_bias={5000: 1.0}), INVALID),
    "max_tokens": (params("what", max_tokens=0), INVALID),
    "min_tokens": (params("what", max_tokens=3, min_tokens=4), INVALID),
    "logprobs": (params("what", logprobs=6), INVALID),
    "too many stops": (params("what", stop=["a", "b", "c"]), INVALID),
    "empty stop": (params("what", stop=[""]), INVALID),
    "stop id": (params("what", stop_token_ids=[5000]), INVALID),
    "n": (params("what", n=129), INVALID),
    "constraint": (params("what", regex="a("), INVALID),
    "constraint and min_tokens": (params("what", regex="a*", min_tokens=2), INVALID),
    "no choice": (params("what", choice=pb.ChoiceConstraint()), INVALID),
    "json_object": (params("what", json_object=False), INVALID),
    "adapter": (with_fields(params("what"), adapter="mine"), INVALID),
    "model": (with_fields(params("what"), model="another"), INVALID),
    "cache_salt": (with_fields(params("what"), cache_salt="a b"), INVALID),
    "request_id": (with_fields(params("what"), request_id="a b"), INVALID),
}


async def test_bad_requests_fail_alone_and_say_why(decoder: RunningDecoder) -> None:
    good = params(source(png(8)), "what is it", max_tokens=4)
    expected = (await generate(decoder, good)).choices[0].text
    for name, (request, kind) in BAD.items():
        once = await failure(generate(decoder, request))
        call = decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
        as_stream = await failure(rest(call))
        for error in (once, as_stream):
            assert type(error) is kind, (name, error)
            assert not INTERNALS.search(error.message), (name, error.message)
            if isinstance(error, INVALID):
                assert error.field, name
        if name.split()[0] in ("temperature", "top_p", "logit_bias", "stop"):
            assert isinstance(once, INVALID)
            assert once.field.startswith("sampling."), name
    assert (await generate(decoder, good)).choices[0].text == expected
    load = await until_idle(decoder)
    assert load.waiting_for_embeddings == 0


async def test_a_broken_image_body_fails_alone_among_others(decoder: RunningDecoder) -> None:
    """The image has a valid header, so that it fails in the encoder, while other requests share the batch."""
    broken = png(9, 300, 300)
    broken = broken[: len(broken) // 2]
    good = [params(source(png(seed)), "what is it", max_tokens=4) for seed in range(10, 18)]
    expected = [(await generate(decoder, request)).choices[0].text for request in good]
    refused = asyncio.create_task(failure(generate(decoder, params(source(broken), "what"))))
    answers = await asyncio.gather(*(generate(decoder, request) for request in good))
    assert isinstance(await refused, errors.ImageUndecodableError)
    assert [response.choices[0].text for response in answers] == expected
    await until_idle(decoder)


async def test_a_user_cannot_spell_a_placeholder(decoder: RunningDecoder) -> None:
    spelled = await decoder.stub.Tokenize(pb.TokenizeRequest(chat=chat("a <image> b", "<im", "age>")))
    assert not spelled.images
    response = await generate(decoder, params("a <image> b", source(png(1)), max_tokens=2))
    assert response.usage.image_tokens == 16


async def test_a_full_queue_says_when_to_come_back(folder: pathlib.Path) -> None:
    async with running_decoder(folder, max_num_seqs=1, max_waiting_requests=1) as decoder:
        running = decoder.stub.GenerateStream(endless(), timeout=60)
        await begun(running)
        waiting = decoder.stub.GenerateStream(endless(), timeout=60)
        while (await decoder.stub.GetLoad(pb.GetLoadRequest())).waiting_requests == 0:
            await asyncio.sleep(0.01)
        error = await failure(generate(decoder, params("what")))
        assert isinstance(error, errors.OverloadedError)
        assert error.retry_after_s > 0
        running.cancel()
        waiting.cancel()
        await until_idle(decoder)


async def test_a_text_on_which_the_tokenizer_panics_fails_alone(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    strip = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
    state = with_short_table(json.loads((model / "tokenizer.json").read_text()))
    change_tokenizer(model, normalizer=state["normalizer"], decoder=strip)
    async with running_decoder(model) as decoder:
        good = [generate(decoder, params(GOOD_TEXT, max_tokens=4, ignore_eos=True)) for _ in range(4)]
        prompts = [
            pb.GenerateParams(chat=chat(PANICKING_TEXT)),
            pb.GenerateParams(text=pb.TextPrompt(text=PANICKING_TEXT)),
        ]
        bad = [failure(generate(decoder, prompt)) for prompt in prompts]
        bad.append(failure(decoder.stub.Tokenize(pb.TokenizeRequest(chat=chat(PANICKING_TEXT)), timeout=60)))
        answers, refusals = await asyncio.gather(asyncio.gather(*good), asyncio.gather(*bad))
        for error in refusals:
            assert isinstance(error, errors.InvalidParameterError)
            assert "tokenizer cannot encode" in error.message
            assert not INTERNALS.search(error.message)
        assert {response.choices[0].finish_reason for response in answers} == {pb.FINISH_REASON_LENGTH}
        tokens = await decoder.stub.Tokenize(pb.TokenizeRequest(text=pb.TextPrompt(text="a")), timeout=60)
        ids = pb.DetokenizeRequest(token_ids=tokens.token_ids[-1:])
        assert isinstance(await failure(decoder.stub.Detokenize(ids, timeout=60)), errors.InternalError)
        assert await generate(decoder, params(GOOD_TEXT, max_tokens=1, ignore_eos=True))
        await until_idle(decoder)
