"""The SDK's client for synchronous code; `lookonce.aio` has the same for asyncio. Needs no torch and no numpy.

with lookonce.Client.connect("127.0.0.1:50051") as client:
    print(client.generate("What is in the picture?", images=["cat.png"]).text)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

import grpc

from lookonce import tracing
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder_info import DecoderLoad, ModelInfo, TokenizedPrompt
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb2
from lookonce.encoder.v1 import encoder_service_pb2_grpc as encoder_grpc
from lookonce.errors import EmbeddingNotCachedError
from lookonce.generation import (
    GenerateOptions,
    Generation,
    Message,
    Pooling,
    Prompt,
    PromptEmbedding,
    RequestOptions,
    Scoring,
    Usage,
)
from lookonce.images import Encoding, ImageLike, ImageRef, as_images
from lookonce.sdk.answers import embedding_of, generation_of, scoring_of
from lookonce.sdk.calls import SyncCalls, not_ready_error
from lookonce.sdk.connection.channel import ConnectionOptions, Deadline, check_request_id, connection_options
from lookonce.sdk.connection.environment import named_connection
from lookonce.sdk.connection.target import Target, checked_target
from lookonce.sdk.connection.tokens import Token
from lookonce.sdk.connections import SyncConnection
from lookonce.sdk.decoder_facts import load_of, model_info_of, tokenized_prompt_of
from lookonce.sdk.encode_plan import EncodePlan, cached_images, lookup_requests
from lookonce.sdk.messages import (
    PreparedPrompt,
    check_one_answer,
    equal_error,
)
from lookonce.sdk.routing.affinity import with_affinity
from lookonce.sdk.text_stream import TextStream
from lookonce.sdk.token_requests import abort_request, detokenize_request, token_texts_of
from lookonce.sdk.uploads import Turn

__all__ = ["Client", "Encoding", "Generation", "ImageRef", "Message", "TextStream", "Usage"]

# Between two looks at a deadline while a client waits for a server.
_POLL_S = 0.05


class Client:
    """A connection to a decoder and, for `encode` and `lookup`, to an encoder. Thread-safe.

    Every method has a deadline and raises the errors of `lookonce.errors`. An image is sent as a digest first, unless
    it is small. If the server does not have the image cached, the client sends the bytes once, by itself.

    A call that no server took, or that one refused because it was full, is repeated up to `max_retries` times until its
    deadline; a stream only before its first text. Pauses are those that servers advise, or short random ones.

    A `timeout_s` of math.inf means no deadline, None the client's default. The server may have a default of its own
    for calls without a deadline.
    """

    def __init__(self, decoder_target: str, encoder_target: str | None, options: ConnectionOptions) -> None:
        """Opens the decoder's channel. Call `connect` instead."""
        self._options = options
        self._calls = SyncCalls(options)
        self._connection = SyncConnection(decoder_target, encoder_target, options, self._calls)

    @classmethod
    def connect(
        cls,
        decoder_target: Target | None = None,
        encoder_target: Target | None = None,
        *,
        timeout_s: float | None = 60.0,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        token: Token | None = None,
        token_over_plaintext: bool = False,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        interceptors: Sequence[Any] = (),
    ) -> Self:
        """Returns a client. It connects at the first call, which raises UnavailableError if a server cannot be reached.

        Targets are host:port, or lists of IP addresses with ports. Without `decoder_target`, the environment names the
        target by LOOKONCE_TARGET, and what else is None by LOOKONCE_TOKEN, LOOKONCE_TLS_CA, LOOKONCE_TLS_CERT and
        LOOKONCE_TLS_KEY. Without `encoder_target`, the client asks the decoder for its encoder.

        `timeout_s` is the default deadline of each method, in seconds; None: no deadline. `max_retries` is the largest
        number of times that a call is repeated. Once a server has answered, a repeated call waits until its deadline
        for one that can be reached.

        `tls_ca` is a PEM file with the servers' authorities, or "system" for those that the operating system trusts;
        without it the connection is plaintext. `tls_cert` and `tls_key` are the client's own certificate and key, for
        servers that ask for one. `token` is sent as a bearer token: a text, a pathlib.Path of a file that is read again
        every five seconds, or a function that is called for each call and does not block. A token goes to another
        machine without TLS only with `token_over_plaintext` (in the environment LOOKONCE_TOKEN_OVER_PLAINTEXT).

        `headers` is further metadata that every call sends, for gateways and meshes on the way. `interceptors` are
        gRPC's (`grpc.UnaryUnaryClientInterceptor` and `grpc.UnaryStreamClientInterceptor`, for an AsyncClient those of
        `grpc.aio`), the outermost first. They see each attempt of a call.

        Raises ConfigurationError or InvalidParameterError for values that no call could use.
        """
        named = named_connection(decoder_target, tls_ca, tls_cert, tls_key, token, token_over_plaintext)
        options = connection_options(
            timeout_s, named.tls_ca, named.tls_cert, named.tls_key, named.token,
            token_over_plaintext=named.token_over_plaintext, max_retries=max_retries, headers=headers,
            interceptors=interceptors,
        )  # fmt: skip
        encoder = None if encoder_target is None else checked_target(encoder_target)
        if encoder is not None:
            options.check_token_is_safe(encoder)
        return cls(checked_target(named.target), encoder, options)

    def with_options(
        self,
        *,
        timeout_s: float | None = None,
        max_retries: int | None = None,
        headers: Mapping[str, str] | None = None,
        token: Token | None = None,
    ) -> Self:
        """Returns a client with other defaults; None leaves one as it is, and headers are added to the earlier ones.

        The two share their connections: closing one closes both. A program that serves several users can send the token
        of each. Raises ConfigurationError as `connect`.
        """
        client = copy.copy(self)
        client._options = self._options.changed(timeout_s, max_retries, headers, token)
        client._calls = self._calls.with_options(client._options)
        if token is not None:
            self._connection.check_token_is_safe(client._options)
        return client

    def generate(
        self,
        prompt: Prompt,
        images: Sequence[ImageLike] = (),
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Returns the answer to a question, to a chat of messages, or to a TextPrompt.

        A question is one user turn with `images` before the text. A chat and a TextPrompt have their own images.
        """
        check_request_id(options.get("request_id"))
        deadline = self._options.deadline(options.get("timeout_s"))
        with tracing.calling("client.generate"):
            prepared = PreparedPrompt(prompt, images, options)
            affinity = prepared.affinity
            metadata = with_affinity(self._options.metadata(options.get("request_id")), affinity)
            with self._connection.uploads.turn(self._options.caller) as turn:
                while True:
                    request = decoder_pb2.GenerateRequest(params=prepared.params())
                    try:
                        attempt = self._connection.placed("Generate", affinity, prepared.adapter, deadline)
                        return generation_of(self._calls.unary(attempt, request, deadline, metadata))
                    except EmbeddingNotCachedError as error:
                        self._supply(prepared, error, deadline, turn)

    def stream(
        self,
        prompt: Prompt,
        images: Sequence[ImageLike] = (),
        **options: Unpack[GenerateOptions],
    ) -> TextStream:
        """Answers as `generate` does, as a stream: iterate for the text, then read `.generation` or `.usage`."""
        check_one_answer(options.get("n"))
        check_request_id(options.get("request_id"))
        deadline = self._options.deadline(options.get("timeout_s"))
        prepared = PreparedPrompt(prompt, images, options)
        span = tracing.start_call("client.stream")
        with tracing.current(span):
            affinity = prepared.affinity
            metadata = with_affinity(self._options.metadata(options.get("request_id")), affinity)
        attempts = self._calls.attempts(deadline)

        def start(wait_for_ready: bool) -> Any:
            request = decoder_pb2.GenerateStreamRequest(params=prepared.params())
            return self._calls.started(
                lambda: self._connection.generate_stream(
                    affinity if attempts.is_first or prepared.adapter else None,
                    prepared.adapter,
                    request,
                    deadline,
                    metadata=metadata,
                    wait_for_ready=wait_for_ready,
                )
            )

        turn = self._connection.uploads.turn(self._options.caller)

        def supply(error: EmbeddingNotCachedError) -> None:
            with tracing.current(span):
                self._supply(prepared, error, deadline, turn)

        stream = TextStream(self._calls, attempts, metadata, start, supply, turn, span)
        self._connection.add(stream)
        return stream

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        images: Sequence[ImageLike] = (),
        *,
        logprobs: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Scoring:
        """Returns how likely each continuation of a prompt is: texts, or ids of tokens.

        `logprobs` is the number of likely alternatives to return for each token.
        """
        check_request_id(options.get("request_id"))
        deadline = self._options.deadline(options.get("timeout_s"))
        with tracing.calling("client.score"):
            prepared = PreparedPrompt(prompt, images, options)
            affinity = prepared.affinity
            metadata = with_affinity(self._options.metadata(options.get("request_id")), affinity)
            with self._connection.uploads.turn(self._options.caller) as turn:
                while True:
                    request = prepared.score_request(continuations, logprobs)
                    try:
                        attempt = self._connection.placed("Score", affinity, prepared.adapter, deadline)
                        response = self._calls.unary(attempt, request, deadline, metadata)
                        return scoring_of(response, len(continuations))
                    except EmbeddingNotCachedError as error:
                        self._supply(prepared, error, deadline, turn)

    def embed(
        self,
        prompt: Prompt,
        images: Sequence[ImageLike] = (),
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        **options: Unpack[RequestOptions],
    ) -> PromptEmbedding:
        """Returns the embedding of a prompt: the model's last hidden state of its last token, or the mean over all.

        With `normalize` its length is 1.
        """
        check_request_id(options.get("request_id"))
        deadline = self._options.deadline(options.get("timeout_s"))
        with tracing.calling("client.embed"):
            prepared = PreparedPrompt(prompt, images, options)
            affinity = prepared.affinity
            metadata = with_affinity(self._options.metadata(options.get("request_id")), affinity)
            with self._connection.uploads.turn(self._options.caller) as turn:
                while True:
                    request = prepared.embed_request(pooling, normalize=normalize)
                    try:
                        attempt = self._connection.placed("Embed", affinity, prepared.adapter, deadline)
                        return embedding_of(self._calls.unary(attempt, request, deadline, metadata))
                    except EmbeddingNotCachedError as error:
                        self._supply(prepared, error, deadline, turn)

    def encode(self, images: Sequence[ImageLike], *, timeout_s: float | None = None) -> list[ImageRef]:
        """Encodes the images that are not cached yet; returns a reference for each, with its `.encoding` filled in."""
        return self._encode(images, self._options.deadline(timeout_s))

    def _encode(self, images: Sequence[ImageLike], deadline: Deadline) -> list[ImageRef]:
        with tracing.calling("client.encode"):
            plan = EncodePlan(as_images(images))
            encoder = self._encoder(deadline)
            for looked_up, lookup in plan.lookups():
                plan.take_lookup(looked_up, self._calls.unary(encoder.LookupEmbeddings, lookup, deadline))
            if not plan.is_complete:
                info = self._calls.unary(encoder.GetEncoderInfo, encoder_pb2.GetEncoderInfoRequest(), deadline)
                for uploaded, upload in plan.uploads(info):
                    plan.take_encoded(uploaded, self._calls.unary(encoder.Encode, upload, deadline))
            return plan.images()

    def lookup(self, images: Sequence[ImageLike], *, timeout_s: float | None = None) -> list[bool]:
        """Returns for each image whether its embedding is cached. Uploads and encodes nothing."""
        deadline = self._options.deadline(timeout_s)
        with tracing.calling("client.lookup"):
            refs = as_images(images)
            encoder = self._encoder(deadline)
            found: set[ImageRef] = set()
            for looked_up, request in lookup_requests(refs, touch=False):
                found.update(cached_images(looked_up, self._calls.unary(encoder.LookupEmbeddings, request, deadline)))
            return [ref in found for ref in refs]

    def tokenize(
        self, prompt: Prompt, images: Sequence[ImageLike] = (), *, timeout_s: float | None = None
    ) -> TokenizedPrompt:
        """Returns the tokens of a prompt and the places of its images. Encodes and generates nothing."""
        deadline = self._options.deadline(timeout_s)
        with tracing.calling("client.tokenize"):
            prepared = PreparedPrompt(prompt, images, {})
            with self._connection.uploads.turn(self._options.caller) as turn:
                while True:
                    request = prepared.tokenize_request()
                    try:
                        response = self._calls.unary(self._connection.decoder.Tokenize, request, deadline)
                        return tokenized_prompt_of(response)
                    except EmbeddingNotCachedError as error:
                        self._supply(prepared, error, deadline, turn)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Returns the text of these tokens."""
        deadline = self._options.deadline(timeout_s)
        with tracing.calling("client.detokenize"):
            request = detokenize_request(token_ids)
            return (self._calls.unary(self._connection.decoder.Detokenize, request, deadline)).text

    def token_texts(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> list[str]:
        """Returns the text of each of these tokens where it follows others, for example with the space before a word.

        A token that is a part of a character is U+FFFD.
        """
        deadline = self._options.deadline(timeout_s)
        with tracing.calling("client.token_texts"):
            request = detokenize_request(token_ids, separately=True)
            response = self._calls.unary(self._connection.decoder.Detokenize, request, deadline)
            return token_texts_of(token_ids, response)

    def load(self, *, timeout_s: float | None = None) -> DecoderLoad:
        """Returns the load of the replica that the call reaches."""
        deadline = self._options.deadline(timeout_s)
        with tracing.calling("client.load"):
            return load_of(self._calls.unary(self._connection.decoder.GetLoad, decoder_pb2.GetLoadRequest(), deadline))

    def model_info(self, *, fresh: bool = False, timeout_s: float | None = None) -> ModelInfo:
        """Returns the decoder's model and limits; later calls return the first answer, unless it is to be `fresh`.

        Its adapters are those of all replicas behind the target, if the client knows them.
        """
        deadline = self._options.deadline(timeout_s)
        if fresh:
            self._connection.info = self._connection.joined_info = None
        with tracing.calling("client.model_info"):
            info = self._model_info(deadline)
            joined = self._connection.joined_info
            if joined is None:
                metadata = self._options.metadata()
                joined = self._connection.with_all_adapters(info, deadline, metadata)
                self._connection.joined_info = joined
            return joined

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a running `generate` or `stream` of the caller's tenant; its answer has the finish reason `abort`.

        The call reaches one replica of those behind the target; a request that it does not know is no error. To end a
        stream of this program, close it.
        """
        deadline = self._options.deadline(timeout_s)
        with tracing.calling("client.abort"):
            request = abort_request(request_id)
            self._calls.unary(self._connection.decoder.AbortRequest, request, deadline)

    def wait_until_ready(self, *, timeout_s: float | None = None) -> None:
        """Waits until a decoder can be reached and says that it serves. Raises DeadlineError, which says if none does.

        It asks without a token, so it says nothing about the caller's rights.
        """
        deadline = self._options.deadline(timeout_s)
        self._calls.check_open()
        ready = grpc.channel_ready_future(self._connection.decoder_channel)
        try:
            # gRPC does not end the wait when the channel is closed.
            while not _is_done(ready, _POLL_S):
                self._calls.check_open()
                if deadline.has_passed():
                    raise not_ready_error()
        finally:
            ready.cancel()

    def close(self) -> None:
        """Closes the channels. Calls and streams in flight end with AbortedError; so do later calls."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encoder(self, deadline: Deadline) -> encoder_grpc.EncoderServiceStub:
        needs_target = self._connection.needs_encoder_target
        announced = self._model_info(deadline).encoder_target if needs_target else ""
        return self._connection.encoder(announced, self._options)

    def _model_info(self, deadline: Deadline) -> ModelInfo:
        self._calls.check_open()
        if self._connection.info is None:
            request = decoder_pb2.GetModelInfoRequest()
            response = self._calls.unary(self._connection.decoder.GetModelInfo, request, deadline)
            self._connection.info = model_info_of(response)
        return self._connection.info

    def _supply(self, prepared: PreparedPrompt, error: EmbeddingNotCachedError, deadline: Deadline, turn: Turn) -> None:
        """Adds the missing images to the next request, or encodes them first if one message cannot hold them.

        Waits instead while another call sends them. Raises an error equal to `error` if the server lacks what the call
        has sent already, or what the caller gave by digest only.
        """
        info = self._model_info(deadline)
        missing = prepared.missing(error, info)
        if turn.has_sent:
            raise equal_error(error)
        pause_s = turn.pause_s(missing)
        if pause_s is not None:
            self._calls.pause(pause_s)
            return
        ahead = prepared.supply(error, info)
        if ahead:
            self._encode(ahead, deadline)


def _is_done(future: grpc.Future[Any], timeout_s: float) -> bool:
    try:
        future.result(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        return False
    return True
