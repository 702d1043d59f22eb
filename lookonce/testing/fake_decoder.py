"""The decoder of a FakeServer: it answers as the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.errors import LookonceError
from lookonce.testing.endings import abort, not_offered
from lookonce.testing.fake_request import FakeRequest
from lookonce.testing.known_images import KnownImages

Answer: TypeAlias = "str | Callable[[FakeRequest], str]"
"""The text of every answer, or a function that returns it and may raise an error of `lookonce.errors`."""


class FakeDecoder(decoder_grpc.DecoderServiceServicer):
    """Answers as a test says, in words as tokens."""

    def __init__(self, answer: Answer, images: KnownImages, max_message_bytes: int) -> None:
        self._answer = answer
        self._images = images
        self._max_message_bytes = max_message_bytes
        # Address of the encoder, which this decoder announces.
        self.target = ""
        self.requests: list[FakeRequest] = []
        self.failures: list[LookonceError] = []

    def Generate(self, request: decoder_pb2.GenerateRequest, context: Any) -> decoder_pb2.GenerateResponse:
        try:
            received, texts, usage = self._answered(request.params, context)
        except LookonceError as error:
            abort(context, error)
        choices = [
            decoder_pb2.Choice(
                index=index,
                text=text,
                token_ids=range(len(text.split())),
                finish_reason=decoder_pb2.FINISH_REASON_STOP,
            )
            for index, text in enumerate(texts)
        ]
        return decoder_pb2.GenerateResponse(request_id=received.request_id, choices=choices, usage=usage)

    def GenerateStream(
        self, request: decoder_pb2.GenerateStreamRequest, context: Any
    ) -> Iterator[decoder_pb2.GenerateStreamResponse]:
        try:
            received, texts, usage = self._answered(request.params, context)
        except LookonceError as error:
            abort(context, error)
        response = decoder_pb2.GenerateStreamResponse
        yield response(started=decoder_pb2.StreamStarted(request_id=received.request_id, usage=usage))
        for choice, text in enumerate(texts):
            for index, word in enumerate(text.split(" ")):
                piece = word if index == 0 else f" {word}"
                delta = decoder_pb2.StreamDelta(index=choice, text=piece, token_ids=[index], token_index=index)
                yield response(delta=delta)
            finished = decoder_pb2.StreamFinished(
                index=choice, finish_reason=decoder_pb2.FINISH_REASON_STOP, usage=usage
            )
            yield response(finished=finished)

    def GetModelInfo(self, request: decoder_pb2.GetModelInfoRequest, context: Any) -> decoder_pb2.GetModelInfoResponse:
        return decoder_pb2.GetModelInfoResponse(
            model="fake",
            model_type="fake",
            encoder_target=self.target,
            image_placeholder="<image>",
            max_message_bytes=self._max_message_bytes,
            max_rows_per_image=self._images.rows_per_image,
            max_context_tokens=1 << 20,
            max_images_per_prompt=1 << 10,
        )

    def GetLoad(self, request: decoder_pb2.GetLoadRequest, context: Any) -> decoder_pb2.GetLoadResponse:
        return decoder_pb2.GetLoadResponse()

    def Tokenize(self, request: decoder_pb2.TokenizeRequest, context: Any) -> decoder_pb2.TokenizeResponse:
        abort(context, not_offered())

    def Detokenize(self, request: decoder_pb2.DetokenizeRequest, context: Any) -> decoder_pb2.DetokenizeResponse:
        abort(context, not_offered())

    def AbortRequest(self, request: decoder_pb2.AbortRequestRequest, context: Any) -> decoder_pb2.AbortRequestResponse:
        """Does nothing: an answer takes no time."""
        return decoder_pb2.AbortRequestResponse()

    def _answered(
        self, params: decoder_pb2.GenerateParams, context: Any
    ) -> tuple[FakeRequest, list[str], decoder_pb2.Usage]:
        """Returns a request with the texts of its answers. Raises what the test or a real server would raise."""
        received = FakeRequest.of(params, dict(context.invocation_metadata()))
        self.requests.append(received)
        if self.failures:
            raise self.failures.pop(0)
        if params.sampling.WhichOneof("constraint") is not None:
            raise not_offered()
        num_new = self._images.shown(received.images)
        num_answers = max(1, params.sampling.n)
        texts = [self._answer if isinstance(self._answer, str) else self._answer(received) for _ in range(num_answers)]
        num_rows, num_words = (
            self._images.rows_per_image * len(received.images),
            sum(len(text.split()) for text in texts),
        )
        num_encoded = self._images.rows_per_image * num_new
        usage = decoder_pb2.Usage(
            prompt_tokens=len(received.text.split()) + num_rows,
            image_tokens=num_rows,
            encoded_image_tokens=num_encoded,
            cached_image_tokens=num_rows - num_encoded,
            completion_tokens=num_words,
        )
        return received, texts, usage
