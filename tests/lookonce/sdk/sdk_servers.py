"""Small servers in the real gRPC shell for the SDK's tests: they know digests, count uploads and echo prompts."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb2
from lookonce.encoder.v1 import encoder_service_pb2_grpc as encoder_grpc
from lookonce.errors import EmbeddingNotCachedError, InvalidParameterError, LookonceError, UnsupportedError
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.serving import GrpcService
from lookonce.server.settings import MIB, ServiceSettings
from lookonce.server.telemetry import Telemetry
from tests.lookonce.server.serving_program import UnsupportedEncoder

NUM_ROWS = 9


class Knowledge:
    """The state of both servers: cached digests and received requests."""

    def __init__(self) -> None:
        # (digest, max_pixels or 0, beside others).
        self.cached: set[tuple[bytes, int, bool]] = set()
        # Whether an image has other rows in a prompt with several images.
        self.tells_apart = False
        # Sizes of the images received as bytes, in order.
        self.uploads: list[int] = []
        # (method, request id, seconds of deadline) of each call.
        self.calls: list[tuple[str, str, float]] = []
        self.metadata: dict[str, str] = {}

    def note(self, method: str, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        self.calls.append((method, self.metadata["x-request-id"], context.time_remaining()))

    def count(self, method: str) -> int:
        return sum(name == method for name, _, _ in self.calls)

    def resolve(self, images: list[common_pb2.ImageSource], *, are_beside_others: bool = False) -> list[bytes]:
        """Returns the digests of the images. Raises EmbeddingNotCachedError for unknown ones."""
        if not self.tells_apart and any(image.beside_others for image in images):
            raise InvalidParameterError("beside_others", "makes no difference here")
        keys = [(self._digest(image), image.max_pixels, image.beside_others or are_beside_others) for image in images]
        self.cached.update(key for key, image in zip(keys, images, strict=True) if image.HasField("data"))
        missing = [index for index, key in enumerate(keys) if key not in self.cached]
        if missing:
            raise EmbeddingNotCachedError("not cached", indexes=missing)
        return [digest for digest, _, _ in keys]

    def _digest(self, image: common_pb2.ImageSource) -> bytes:
        if not image.HasField("data"):
            return image.key.digest
        self.uploads.append(len(image.data))
        digest = bytes(image_digest(image.data))
        assert image.expected_digest == digest
        return digest


class EchoDecoder(decoder_grpc.DecoderServiceServicer):
    """Answers with the prompt's text, word by word, and the number of images."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.encoder_target = ""
        self.max_message_bytes = 32 * MIB
        self.last: decoder_pb2.GenerateParams = decoder_pb2.GenerateParams()
        self.delay_s = 0.0
        # Seconds that GetModelInfo takes.
        self.info_delay_s = 0.0
        # Raised by the next calls in turn, before their answer.
        self.failures: list[LookonceError] = []
        # Raised by a stream after its first word.
        self.error_after_first_word: LookonceError | None = None
        # Events that a stream sends instead of the echo.
        self.events: list[decoder_pb2.GenerateStreamResponse] | None = None
        self.ended_streams = 0

    async def Generate(self, request: decoder_pb2.GenerateRequest, context: Any) -> decoder_pb2.GenerateResponse:
        self.knowledge.note("Generate", context)
        words, usage = await self._answer(request.params)
        choice = decoder_pb2.Choice(
            text=" ".join(words), token_ids=range(len(words)), finish_reason=decoder_pb2.FINISH_REASON_STOP
        )
        return decoder_pb2.GenerateResponse(request_id="r", choices=[choice], usage=usage)

    async def GenerateStream(
        self, request: decoder_pb2.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[decoder_pb2.GenerateStreamResponse]:
        self.knowledge.note("GenerateStream", context)
        try:
            words, usage = await self._answer(request.params)
            for event in self.events if self.events is not None else stream_of(words, usage):
                yield event
                if self.error_after_first_word is not None and event.HasField("delta"):
                    raise self.error_after_first_word
        finally:
            self.ended_streams += 1

    async def _answer(self, params: decoder_pb2.GenerateParams) -> tuple[list[str], decoder_pb2.Usage]:
        self.last = params
        if self.failures:
            raise self.failures.pop(0)
        await asyncio.sleep(self.delay_s)
        parts = [part for message in params.chat.messages for part in message.parts]
        images = [*(part.image for part in parts if part.HasField("image")), *params.text.images]
        digests = self.knowledge.resolve(images, are_beside_others=self.knowledge.tells_apart and len(images) > 1)
        words = " ".join([*(part.text for part in parts if part.HasField("text")), params.text.text]).split()
        usage = decoder_pb2.Usage(prompt_tokens=len(words), image_tokens=NUM_ROWS * len(digests))
        usage.time_to_first_token.FromMilliseconds(250)
        return [*words, f"+{len(digests)}"], usage

    async def Embed(self, request: decoder_pb2.EmbedRequest, context: Any) -> decoder_pb2.EmbedResponse:
        raise NotImplementedError

    async def Score(self, request: decoder_pb2.ScoreRequest, context: Any) -> decoder_pb2.ScoreResponse:
        raise NotImplementedError

    async def GetModelInfo(
        self, request: decoder_pb2.GetModelInfoRequest, context: Any
    ) -> decoder_pb2.GetModelInfoResponse:
        self.knowledge.note("GetModelInfo", context)
        await asyncio.sleep(self.info_delay_s)
        return decoder_pb2.GetModelInfoResponse(
            model="echo",
            encoder_target=self.encoder_target,
            max_message_bytes=self.max_message_bytes,
            rows_depend_on_image_count=self.knowledge.tells_apart,
        )

    async def Tokenize(self, request: decoder_pb2.TokenizeRequest, context: Any) -> decoder_pb2.TokenizeResponse:
        raise UnsupportedError("not in this test")

    async def Detokenize(self, request: decoder_pb2.DetokenizeRequest, context: Any) -> decoder_pb2.DetokenizeResponse:
        raise UnsupportedError("not in this test")

    async def GetLoad(self, request: decoder_pb2.GetLoadRequest, context: Any) -> decoder_pb2.GetLoadResponse:
        raise UnsupportedError("not in this test")

    async def AbortRequest(
        self, request: decoder_pb2.AbortRequestRequest, context: Any
    ) -> decoder_pb2.AbortRequestResponse:
        raise UnsupportedError("not in this test")


def stream_of(words: list[str], usage: decoder_pb2.Usage) -> list[decoder_pb2.GenerateStreamResponse]:
    """Returns the events of a stream: Started, one delta per word, Finished."""
    response = decoder_pb2.GenerateStreamResponse
    events = [response(started=decoder_pb2.StreamStarted(request_id="r", usage=usage))]
    for index, word in enumerate(words):
        text = word if index == 0 else f" {word}"
        events.append(response(delta=decoder_pb2.StreamDelta(text=text, token_ids=[index], token_index=index)))
    finished = decoder_pb2.StreamFinished(finish_reason=decoder_pb2.FINISH_REASON_STOP, usage=usage)
    return [*events, response(finished=finished)]


class CountingEncoder(UnsupportedEncoder):
    """An encoder that caches digests. Its limits are small, to make clients send several batches."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.max_batch_items = 2
        self.max_message_bytes = MIB
        self.batch_sizes: list[int] = []
        # Raised by the next look-ups in turn.
        self.failures: list[LookonceError] = []

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Any) -> encoder_pb2.EncodeResponse:
        self.knowledge.note("Encode", context)
        if len(request.items) > self.max_batch_items:
            raise InvalidParameterError("items", "too many")
        self.batch_sizes.append(len(request.items))
        response = encoder_pb2.EncodeResponse()
        for digest in self.knowledge.resolve([item.image for item in request.items]):
            result = response.results.add(source=encoder_pb2.RESULT_SOURCE_COMPUTED, stored=True)
            result.embedding.CopyFrom(_embedding(digest))
            result.compute_time.FromMilliseconds(20)
        return response

    async def LookupEmbeddings(
        self, request: encoder_pb2.LookupEmbeddingsRequest, context: Any
    ) -> encoder_pb2.LookupEmbeddingsResponse:
        self.knowledge.note("LookupEmbeddings", context)
        if self.failures:
            raise self.failures.pop(0)
        if len(request.keys) > 256:
            raise InvalidParameterError("keys", "too many")
        response = encoder_pb2.LookupEmbeddingsResponse()
        for key in request.keys:
            result = response.results.add(
                cached=(key.digest, request.max_pixels, request.beside_others) in self.knowledge.cached
            )
            if result.cached:
                result.embedding.CopyFrom(_embedding(key.digest))
        return response

    async def GetEncoderInfo(
        self, request: encoder_pb2.GetEncoderInfoRequest, context: Any
    ) -> encoder_pb2.GetEncoderInfoResponse:
        self.knowledge.note("GetEncoderInfo", context)
        return encoder_pb2.GetEncoderInfoResponse(
            max_batch_items=self.max_batch_items, max_message_bytes=self.max_message_bytes
        )


def _embedding(digest: bytes) -> common_pb2.EmbeddingInfo:
    return common_pb2.EmbeddingInfo(
        key=common_pb2.ContentKey(digest=digest), num_rows=NUM_ROWS, hidden_size=4, size_bytes=NUM_ROWS * 16
    )


class System:
    """A running decoder and encoder."""

    def __init__(self) -> None:
        self.knowledge = Knowledge()
        self.decoder = EchoDecoder(self.knowledge)
        self.encoder = CountingEncoder(self.knowledge)
        self.decoder_target = ""
        self.encoder_target = ""


@contextlib.asynccontextmanager
async def running_system(
    is_ready: Callable[[], bool] = lambda: True, decoder_listen: str = "127.0.0.1:0", **settings: Any
) -> AsyncIterator[System]:
    """Runs a decoder and an encoder. `is_ready` sets their health; the decoder announces the encoder."""
    system = System()

    def add_decoder(server: Any) -> None:
        decoder_grpc.add_DecoderServiceServicer_to_server(system.decoder, server)

    def add_encoder(server: Any) -> None:
        encoder_grpc.add_EncoderServiceServicer_to_server(system.encoder, server)

    values = ServiceSettings(model=pathlib.Path("."), drain_timeout_s=0.0, **settings)
    decoders = [ServiceEntry("lookonce.decoder.v1.DecoderService", add_decoder)]
    encoders = [ServiceEntry("lookonce.encoder.v1.EncoderService", add_encoder)]
    decoder_values = values.model_copy(update={"listen": decoder_listen})
    decoder = GrpcService(decoder_values, Telemetry(), decoders, is_ready=is_ready)
    encoder = GrpcService(values, Telemetry(), encoders, is_ready=is_ready)
    system.decoder_target, system.encoder_target = await decoder.start(), await encoder.start()
    system.decoder.encoder_target = system.encoder_target
    try:
        yield system
    finally:
        await decoder.stop()
        await encoder.stop()
