"""The decoder of a FakeServer: it answers as the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.errors import LookonceError
from lookonce.generation import Message
from lookonce.testing.endings import abort, not_offered
from lookonce.testing.fake_adapters import FakeAdapters
from lookonce.testing.fake_numbers import FakeNumbers
from lookonce.testing.fake_request import FakeRequest, Method
from lookonce.testing.known_images import KnownImages

Answer: TypeAlias = "str | Message | Callable[[FakeRequest], str | Message]"
"""Every answer, or a function that returns it and may raise an error of `lookonce.errors`.

An answer is a text, or a message with a text, calls of functions and reasoning.
"""


class FakeDecoder(decoder_grpc.DecoderServiceServicer):
    """Answers as a test says, in words as tokens."""

    def __init__(
        self,
        answer: Answer,
        images: KnownImages,
        max_message_bytes: int,
        adapters: FakeAdapters | None = None,
        numbers: FakeNumbers | None = None,
    ) -> None:
        """`adapters` None: none are served; `numbers` None: those of a FakeServer by default."""
        self._answer = answer
        self._images = images
        self._adapters = adapters or FakeAdapters(())
        self._numbers = numbers or FakeNumbers(None, None)
        self._max_message_bytes = max_message_bytes
        # Address of the encoder, which this decoder announces.
        self.target = ""
        self.requests: list[FakeRequest] = []
        self.failures: list[LookonceError] = []

    def Generate(self, request: decoder_pb2.GenerateRequest, context: Any) -> decoder_pb2.GenerateResponse:
        try:
            received, answers, usage = self._answered(request.params, context)
        except LookonceError as error:
            abort(context, error)
        choices = [
            decoder_pb2.Choice(
                index=index,
                text=_text_of(answer),
                token_ids=range(len(_text_of(answer).split())),
                finish_reason=_finish_reason(answer),
                tool_calls=[
                    decoder_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                    for call in answer.tool_calls
                ],
                reasoning=answer.reasoning,
            )
            for index, answer in enumerate(answers)
        ]
        return decoder_pb2.GenerateResponse(request_id=received.request_id, choices=choices, usage=usage)

    def GenerateStream(
        self, request: decoder_pb2.GenerateStreamRequest, context: Any
    ) -> Iterator[decoder_pb2.GenerateStreamResponse]:
        try:
            received, answers, usage = self._answered(request.params, context)
        except LookonceError as error:
            abort(context, error)
        response = decoder_pb2.GenerateStreamResponse
        yield response(started=decoder_pb2.StreamStarted(request_id=received.request_id, usage=usage))
        for index, answer in enumerate(answers):
            for delta in _deltas(answer):
                delta.index = index
                yield response(delta=delta)
            finished = decoder_pb2.StreamFinished(index=index, finish_reason=_finish_reason(answer), usage=usage)
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
            tool_format="fake",
            template_arguments=["enable_thinking"],
            adapters=self._adapters.names,
        )

    def GetLoad(self, request: decoder_pb2.GetLoadRequest, context: Any) -> decoder_pb2.GetLoadResponse:
        return decoder_pb2.GetLoadResponse()

    def Score(self, request: decoder_pb2.ScoreRequest, context: Any) -> decoder_pb2.ScoreResponse:
        try:
            received, usage = self._received(request.params, context, "score", request.continuations)
            scores = self._numbers.scores(received, keeps_logprobs=request.HasField("logprobs"))
        except LookonceError as error:
            abort(context, error)
        usage.completion_tokens = sum(len(score.token_ids) for score in scores)
        return decoder_pb2.ScoreResponse(request_id=received.request_id, scores=scores, usage=usage)

    def Embed(self, request: decoder_pb2.EmbedRequest, context: Any) -> decoder_pb2.EmbedResponse:
        try:
            received, usage = self._received(request.params, context, "embed")
            values = self._numbers.embedding(received, keeps_length=request.keep_length)
        except LookonceError as error:
            abort(context, error)
        return decoder_pb2.EmbedResponse(request_id=received.request_id, embedding=values, usage=usage)

    def Tokenize(self, request: decoder_pb2.TokenizeRequest, context: Any) -> decoder_pb2.TokenizeResponse:
        abort(context, not_offered())

    def Detokenize(self, request: decoder_pb2.DetokenizeRequest, context: Any) -> decoder_pb2.DetokenizeResponse:
        abort(context, not_offered())

    def AbortRequest(self, request: decoder_pb2.AbortRequestRequest, context: Any) -> decoder_pb2.AbortRequestResponse:
        """Does nothing: an answer takes no time."""
        return decoder_pb2.AbortRequestResponse()

    def _answered(
        self, params: decoder_pb2.GenerateParams, context: Any
    ) -> tuple[FakeRequest, list[Message], decoder_pb2.Usage]:
        """Returns a request with its answers. Raises what the test or a real server would raise."""
        received, usage = self._received(params, context, "generate")
        answers = [self._answer_to(received) for _ in range(max(1, params.sampling.n))]
        usage.completion_tokens = sum(len(_text_of(answer).split()) for answer in answers)
        return received, answers, usage

    def _received(
        self,
        params: decoder_pb2.GenerateParams,
        context: Any,
        method: Method,
        continuations: Iterable[decoder_pb2.Continuation] = (),
    ) -> tuple[FakeRequest, decoder_pb2.Usage]:
        """Returns a request with its prompt's usage. Raises as `_answered`."""
        received = FakeRequest.of(params, dict(context.invocation_metadata()), method, continuations)
        self.requests.append(received)
        if self.failures:
            raise self.failures.pop(0)
        if params.sampling.WhichOneof("constraint") is not None:
            raise not_offered()
        self._adapters.check(received.adapter)
        num_new = self._images.shown(received.images)
        num_rows = self._images.rows_per_image * len(received.images)
        num_encoded = self._images.rows_per_image * num_new
        usage = decoder_pb2.Usage(
            prompt_tokens=len(received.text.split()) + num_rows,
            image_tokens=num_rows,
            encoded_image_tokens=num_encoded,
            cached_image_tokens=num_rows - num_encoded,
        )
        return received, usage

    def _answer_to(self, received: FakeRequest) -> Message:
        answer = self._answer(received) if callable(self._answer) else self._answer
        return Message("assistant", answer) if isinstance(answer, str) else answer


def _text_of(answer: Message) -> str:
    """Returns the text of an answer. Raises TypeError for one with other parts."""
    if not isinstance(answer.content, str):
        raise TypeError("the answer of a FakeServer must be a text or a Message with a text as content")
    return answer.content


def _finish_reason(answer: Message) -> decoder_pb2.FinishReason.ValueType:
    return decoder_pb2.FINISH_REASON_TOOL_CALLS if answer.tool_calls else decoder_pb2.FINISH_REASON_STOP


def _deltas(answer: Message) -> Iterator[decoder_pb2.StreamDelta]:
    """Yields an answer in pieces: reasoning, words as tokens, and calls, whose arguments come in two parts."""
    if answer.reasoning:
        yield decoder_pb2.StreamDelta(reasoning=answer.reasoning)
    text = _text_of(answer)
    for index, word in enumerate(text.split(" ") if text or not answer.tool_calls else []):
        piece = word if index == 0 else f" {word}"
        yield decoder_pb2.StreamDelta(text=piece, token_ids=[index], token_index=index)
    for index, call in enumerate(answer.tool_calls):
        half = len(call.arguments) // 2
        head = decoder_pb2.ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments[:half])
        yield decoder_pb2.StreamDelta(tool_calls=[head])
        yield decoder_pb2.StreamDelta(
            tool_calls=[decoder_pb2.ToolCallDelta(index=index, arguments=call.arguments[half:])]
        )
