"""A refused or failed call gives its memory back at once, in both services and the SDK, not at a later collection."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

import lookonce
from decoder_svc.request_gate import RequestGate
from decoder_svc.runner.base import ModelRunnerBase
from encoder_svc.cache.queue_places import QueuePlaces
from encoder_svc.images.image_inputs import VisionAdapter
from encoder_svc.vision.batcher import ForwardBatcher
from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb
from lookonce.errors import LookonceError, OverloadedError, UnavailableError
from lookonce.server.admission.quotas import Quotas
from tests import image_files
from tests.allocated_memory import nothing_left
from tests.conftest import DEMO_MODEL, SERVICE_FLAGS
from tests.in_process_stack import InProcessStack

MIB = 1 << 20
IMAGE_BYTES = 8 * MIB
# After calls that keep nothing, gRPC's buffers were up to 8.3 MiB larger, after two calls as after six. Four calls that
# keep their images would leave 32 MiB.
NUM_CALLS = 4
# On a busy machine they were more than 16 MiB larger, once in some 200 tests.
LEFT_BYTES = NUM_CALLS * IMAGE_BYTES * 3 // 4
# The same for calls that end on their way to the encoder. The buffers of both connections were up to 22 MiB larger.
NUM_ENDED_CALLS = 2 * NUM_CALLS
NOISE = os.urandom(IMAGE_BYTES)
ENCODER, DECODER = "/lookonce.encoder.v1.EncoderService/", "/lookonce.decoder.v1.DecoderService/"
KINDS = ("Encode", "EncodeStream", "Generate", "GenerateStream")
CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
# Shorter than the encodes of `slow_encodes`.
SHORT_S, ENCODE_S = 0.3, 1.0


@pytest.fixture(scope="module")
def stack() -> Iterator[InProcessStack]:
    """One encoder and one decoder that take files a little larger than the tests' images."""
    limits = ("--max-image-bytes", str(9 * MIB))
    # pytest keeps log records with their tracebacks, which refer to the requests.
    logging.disable()
    with InProcessStack(
        DEMO_MODEL, encoder_arguments=(*SERVICE_FLAGS, *limits), decoder_arguments=(*SERVICE_FLAGS, *limits)
    ) as running:
        yield running
    logging.disable(logging.NOTSET)


def good_image(seed: int) -> bytes:
    """A picture with noise behind its end, which decoders ignore."""
    return image_files.encoded(image_files.noise(seed, 90, 40)) + NOISE


def broken_image(seed: int) -> bytes:
    """A picture whose header is good and whose pixels are noise."""
    good = image_files.encoded(image_files.noise(seed, 90, 40))
    return good[: good.index(b"IDAT") + 20] + NOISE


def source(data: bytes = NOISE, **fields: Any) -> common_pb2.ImageSource:
    return common_pb2.ImageSource(data=data, **fields)


def message_of(kind: str, image: common_pb2.ImageSource, **fields: Any) -> Message:
    """A request of an RPC with one image, which is copied once, and further fields of the request."""
    if kind == "Encode":
        encode = encoder_pb.EncodeRequest(**fields)
        encode.items.add().image.CopyFrom(image)
        return encode
    if kind == "EncodeStream":
        item = encoder_pb.EncodeStreamRequest(item_id="a")
        item.item.image.CopyFrom(image)
        return item
    text = fields.pop("text", "What is it?")
    sampling = decoder_pb.SamplingParams(**{"max_tokens": 4, **fields.pop("sampling", {})})
    params = decoder_pb.GenerateParams(sampling=sampling, **fields)
    request_class = decoder_pb.GenerateRequest if kind == "Generate" else decoder_pb.GenerateStreamRequest
    request = request_class(params=params)
    message = request.params.chat.messages.add(role=decoder_pb.ROLE_USER)
    message.parts.add().image.CopyFrom(image)
    message.parts.add(text=text)
    return request


def outcome(stack: InProcessStack, kind: str, raw: bytes, timeout_s: float = 60) -> str:
    """Makes one call and returns its status, or the code of the item for EncodeStream."""
    target = (stack.encoder_targets if kind.startswith("Encode") else stack.decoder_targets)[0]
    method = (ENCODER if kind.startswith("Encode") else DECODER) + kind
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as opened:
        channel: Any = opened
        try:
            if kind == "EncodeStream":
                (answer,) = channel.stream_stream(method)(iter([raw]), timeout=timeout_s)
                item = encoder_pb.EncodeStreamResponse.FromString(answer).error
                return next(code.name for code in grpc.StatusCode if code.value[0] == item.code)
            if kind == "GenerateStream":
                list(channel.unary_stream(method)(raw, timeout=timeout_s))
            else:
                channel.unary_unary(method)(raw, timeout=timeout_s)
        except grpc.RpcError as error:
            # A stream is its own exception: without this the test's frame and the call would be a cycle.
            error.__traceback__ = None
            return str(error.code().name)
    return "OK"


def check(
    stack: InProcessStack,
    kind: str,
    code: str,
    make: Callable[[int], Message | bytes],
    timeout_s: float = 60,
    num_calls: int = NUM_CALLS,
) -> None:
    """Calls a few times, each with the request `make(number)`, and looks at the memory that stays in use."""

    def call(number: int) -> None:
        request = make(number)
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        assert outcome(stack, kind, raw, timeout_s) == code

    call(0)
    with nothing_left(num_calls * IMAGE_BYTES * 3 // 4):
        for number in range(1, 1 + num_calls):
            call(number)


def malformed(_: int) -> bytes:
    """A message that ends too early."""
    return b"\x0a\xff\xff\xff\x7f" + NOISE


REFUSED_BY_BOTH: dict[str, Callable[[int], common_pb2.ImageSource]] = {
    "digest of a wrong length": lambda _: source(expected_digest=b"1"),
    "digest mismatch": lambda _: source(expected_digest=bytes(32)),
    "option that the model lacks": lambda _: source(max_pixels=77),
    "undecodable": lambda _: source(),
    "broken": lambda number: source(broken_image(number)),
    "too many pixels": lambda _: source(image_files.png_of_size(30_000, 30_000) + NOISE),
    "too many bytes": lambda _: source(NOISE + bytes(2 * MIB)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("image", REFUSED_BY_BOTH.values(), ids=REFUSED_BY_BOTH)
def test_a_refused_image(stack: InProcessStack, kind: str, image: Callable[[int], common_pb2.ImageSource]) -> None:
    # Each kind has its own pictures, because one that fails is remembered.
    offset = 10 * KINDS.index(kind)
    check(stack, kind, "INVALID_ARGUMENT", lambda number: message_of(kind, image(offset + number)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_message(stack: InProcessStack, kind: str) -> None:
    check(stack, kind, "INVALID_ARGUMENT", malformed)


REFUSED_ENCODES: dict[str, tuple[str, dict[str, Any]]] = {
    "fingerprint": ("FAILED_PRECONDITION", {"expected_encoder_fingerprint": "another"}),
    "cache policy": ("INVALID_ARGUMENT", {"cache_policy": 99}),
    "not cached": ("NOT_FOUND", {"cache_policy": encoder_pb.CACHE_POLICY_ONLY_IF_CACHED}),
}


@pytest.mark.parametrize(("code", "fields"), REFUSED_ENCODES.values(), ids=REFUSED_ENCODES)
def test_a_refused_encode(stack: InProcessStack, code: str, fields: dict[str, Any]) -> None:
    check(stack, "Encode", code, lambda _: message_of("Encode", source(), **fields))


def test_an_encode_of_several_images_of_which_two_are_bad(stack: InProcessStack) -> None:
    bad = (source(), source(image_files.png_of_size(30_000, 30_000) + NOISE))
    items = [encoder_pb.EncodeItem(image=image) for image in bad]
    check(stack, "Encode", "INVALID_ARGUMENT", lambda _: encoder_pb.EncodeRequest(items=items))


REFUSED_PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("INVALID_ARGUMENT", {"model": "another"}),
    "adapter": ("INVALID_ARGUMENT", {"adapter": "a"}),
    "request id": ("INVALID_ARGUMENT", {"request_id": "no spaces"}),
    "sampling": ("INVALID_ARGUMENT", {"sampling": {"temperature": -1.0}}),
    "context": ("INVALID_ARGUMENT", {"text": "word " * 4000}),
    "cache salt": ("INVALID_ARGUMENT", {"cache_salt": "no spaces"}),
}


@pytest.mark.parametrize("kind", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(("code", "fields"), REFUSED_PROMPTS.values(), ids=REFUSED_PROMPTS)
def test_a_refused_prompt(stack: InProcessStack, kind: str, code: str, fields: dict[str, Any]) -> None:
    check(stack, kind, code, lambda number: message_of(kind, source(good_image(100 + number)), **fields))


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_queue(stack: InProcessStack, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OverloadedError("full")

    monkeypatch.setattr(QueuePlaces, "taken", refuse)
    monkeypatch.setattr(RequestGate, "_check_place", refuse)
    offset = 200 + 10 * KINDS.index(kind)
    check(stack, kind, "RESOURCE_EXHAUSTED", lambda number: message_of(kind, source(good_image(offset + number))))


@pytest.mark.parametrize("kind", ["Encode", "Generate", "GenerateStream"])
def test_a_used_up_quota(stack: InProcessStack, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OverloadedError("used up")

    monkeypatch.setattr(Quotas, "charge", refuse)
    check(stack, kind, "RESOURCE_EXHAUSTED", lambda _: message_of(kind, source()))


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_that_does_not_answer(stack: InProcessStack, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise UnavailableError("the model hangs")

    monkeypatch.setattr(ForwardBatcher, "check_answering", refuse)
    offset = 300 + 10 * KINDS.index(kind)
    check(stack, kind, "UNAVAILABLE", lambda number: message_of(kind, source(good_image(offset + number))))


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_on_which_the_model_fails(stack: InProcessStack, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(VisionAdapter, "image_rows", fail)
    monkeypatch.setattr(ForwardBatcher, "_is_model_working", lambda _: True)
    offset = 400 + 10 * KINDS.index(kind)
    check(stack, kind, "INVALID_ARGUMENT", lambda number: message_of(kind, source(good_image(offset + number))))


@pytest.mark.parametrize("kind", ["Generate", "GenerateStream"])
def test_a_failed_step_of_the_engine(stack: InProcessStack, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = ModelRunnerBase.execute_model
    offset = 500 + 10 * KINDS.index(kind)

    def fail(runner: ModelRunnerBase, output: Any) -> Any:
        if output.chunks:
            raise ValueError("a fault")
        return execute(runner, output)

    def call(number: int) -> Message:
        monkeypatch.setattr(ModelRunnerBase, "execute_model", execute)
        # A step that succeeds: three failures in a row would end the engine.
        text = decoder_pb.GenerateParams(text=decoder_pb.TextPrompt(text="hello"))
        assert outcome(stack, "Generate", decoder_pb.GenerateRequest(params=text).SerializeToString()) == "OK"
        monkeypatch.setattr(ModelRunnerBase, "execute_model", fail)
        return message_of(kind, source(good_image(offset + number)))

    check(stack, kind, "INTERNAL", call)


@pytest.fixture
def slow_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model takes longer than the tests' callers wait, and then fails."""

    def submit(*_: object) -> Future[Any]:
        late: Future[Any] = Future()
        asyncio.get_running_loop().call_later(ENCODE_S, late.set_exception, UnavailableError("late"))
        return late

    monkeypatch.setattr(ForwardBatcher, "submit", submit)


@pytest.mark.usefixtures("slow_encodes")
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_past_its_deadline(stack: InProcessStack, kind: str) -> None:
    offset = 600 + 10 * KINDS.index(kind)
    images = [message_of(kind, source(good_image(offset + number))) for number in range(1 + NUM_ENDED_CALLS)]
    check(stack, kind, "DEADLINE_EXCEEDED", images.__getitem__, SHORT_S, NUM_ENDED_CALLS)


@pytest.mark.usefixtures("slow_encodes")
@pytest.mark.parametrize("kind", ["Encode", "Generate"])
def test_a_call_that_its_client_cancels(stack: InProcessStack, kind: str) -> None:
    target = (stack.encoder_targets if kind == "Encode" else stack.decoder_targets)[0]
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        method: Any = channel.unary_unary((ENCODER if kind == "Encode" else DECODER) + kind)

        def call(number: int) -> None:
            future = method.future(message_of(kind, source(good_image(number))).SerializeToString())
            with pytest.raises(grpc.FutureTimeoutError):
                future.result(SHORT_S)
            future.cancel()

        offset = 700 + 10 * KINDS.index(kind)
        call(offset)
        with nothing_left(NUM_ENDED_CALLS * IMAGE_BYTES // 2):
            for number in range(1, 1 + NUM_ENDED_CALLS):
                call(offset + number)


def test_failed_calls_of_the_sdk(stack: InProcessStack) -> None:
    question = "What is it?"
    with lookonce.Client.connect(stack.decoder_targets[0], stack.encoder_targets[0], max_retries=0) as client:

        def generate(data: bytes) -> None:
            client.generate(question, images=[data])

        def stream(data: bytes) -> None:
            list(client.stream(question, images=[data]))

        def encode(data: bytes) -> None:
            client.encode([data])

        for call in (generate, stream, encode):
            _fails(call)
            with nothing_left(LEFT_BYTES):
                for _ in range(NUM_CALLS):
                    _fails(call)


def test_failed_calls_of_the_asyncio_sdk(stack: InProcessStack) -> None:
    question = "What is it?"

    async def run() -> None:
        async with lookonce.AsyncClient.connect(
            stack.decoder_targets[0], stack.encoder_targets[0], max_retries=0
        ) as client:

            async def generate(data: bytes) -> None:
                await client.generate(question, images=[data])

            async def stream(data: bytes) -> None:
                async for _ in client.stream(question, images=[data]):
                    pass

            async def encode(data: bytes) -> None:
                await client.encode([data])

            for call in (generate, stream, encode):
                await _fails_async(call)
                with nothing_left(LEFT_BYTES):
                    for _ in range(NUM_CALLS):
                        await _fails_async(call)

    asyncio.run(run())


def _fails(call: Callable[[bytes], None]) -> None:
    try:
        call(os.urandom(IMAGE_BYTES))
    except LookonceError:
        return
    raise AssertionError("noise is no image")


async def _fails_async(call: Callable[[bytes], Any]) -> None:
    try:
        await call(os.urandom(IMAGE_BYTES))
    except LookonceError:
        # The threads and tasks of the call end.
        await asyncio.sleep(0.1)
        return
    raise AssertionError("noise is no image")
