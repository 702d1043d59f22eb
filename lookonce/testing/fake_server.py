"""A gRPC server that answers as the caller's test says, and caches images as the services do.

with FakeServer("a red square") as server, lookonce.Client.connect(server.target) as client:
    assert client.generate("What is it?", images=["cat.png"]).text == "a red square"
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc

from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.encoder.v1 import encoder_service_pb2_grpc as encoder_grpc
from lookonce.errors import LookonceError
from lookonce.testing.fake_adapters import FakeAdapters
from lookonce.testing.fake_decoder import Answer, FakeDecoder
from lookonce.testing.fake_encoder import FakeEncoder
from lookonce.testing.fake_numbers import Embedding, FakeNumbers, Likelihood
from lookonce.testing.fake_request import FakeRequest
from lookonce.testing.known_images import KnownImages

# Each call takes one, and so does each connection of a client, which reads health.
_NUM_THREADS = 256
_HEALTH = "grpc.health.v1.Health"
# HealthCheckResponse with the status SERVING.
_SERVING = b"\x08\x01"
_POLL_S = 0.1
_MAX_MESSAGE_BYTES = 32 << 20


class FakeServer:
    """A decoder and an encoder behind one target of this machine, in threads of this process.

    A token is a word. An image has always the same number of rows, and is known by its digest once its bytes were sent.
    Options of sampling have no effect. Adapters are names, which an AdminClient of the same target may load and unload.
    Videos, structured output, tokenizing and operators' calls about images are not offered. A function that answers
    must return: Python waits for it when the program ends.
    """

    def __init__(
        self,
        answer: Answer = "an answer",
        *,
        rows_per_image: int = 16,
        adapters: Iterable[str] = (),
        likelihood: Likelihood | None = None,
        embedding: Embedding | None = None,
    ) -> None:
        """`adapters` are the names of LoRA adapters that are served from the start.

        `likelihood` is the log-probability of each continuation of a score request, or a function of the request and
        the continuation that returns it. None: -1 for each word or token id. The likeliest continuation of a request is
        the greedy one.

        `embedding` is the vector of each prompt, or a function of the request that returns it. None: eight numbers that
        depend on the request's text, images and adapter. Vectors get the length 1 unless the caller keeps their length.
        """
        self.images = KnownImages(rows_per_image)
        self._adapters = FakeAdapters(adapters)
        numbers = FakeNumbers(likelihood, embedding)
        self._decoder = FakeDecoder(answer, self.images, _MAX_MESSAGE_BYTES, self._adapters, numbers)
        self._server: grpc.Server | None = None
        self._ended = threading.Event()
        self._target = ""

    @property
    def target(self) -> str:
        """Address of both services. Raises RuntimeError before the start and after the end."""
        if self._server is None:
            raise RuntimeError("the server does not run: use `with`, or call start")
        return self._target

    @property
    def requests(self) -> list[FakeRequest]:
        """The generate, score and embed requests so far, in the order of their arrival; those that failed, too."""
        return list(self._decoder.requests)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are served now, sorted."""
        return self._adapters.names

    def fail(self, *errors: LookonceError) -> None:
        """Makes the next generate, score and embed requests fail, one with each error, instead of being answered.

        Raises TypeError for anything but errors of `lookonce.errors`.
        """
        for error in errors:
            given: object = error
            if not isinstance(given, LookonceError):
                raise TypeError(
                    f"an error of lookonce.errors is needed, such as OverloadedError('full'); got {given!r}"
                )
        self._decoder.failures.extend(errors)

    def start(self) -> None:
        """Listens on a free port of this machine. Raises RuntimeError if the server runs already."""
        if self._server is not None:
            raise RuntimeError("the server runs already")
        self._ended.clear()
        server = grpc.server(
            ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fake-server"),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                # An answer may be held back for minutes, during which clients ping; the services allow as much.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ],
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(_HEALTH, {"Watch": self._watch_handler()})]
        )
        decoder_grpc.add_DecoderServiceServicer_to_server(self._decoder, server)
        decoder_grpc.add_DecoderAdminServiceServicer_to_server(self._adapters, server)
        encoder_grpc.add_EncoderServiceServicer_to_server(FakeEncoder(self.images, _MAX_MESSAGE_BYTES), server)
        self._target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self._decoder.target = self._target
        server.start()
        self._server = server

    def close(self) -> None:
        """Ends all calls and the server."""
        if self._server is not None:
            self._ended.set()
            self._server.stop(None).wait()
            self._server = None

    def _watch_handler(self) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Returns the handler of health's stream, which clients read while they are connected."""

        def watch(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield _SERVING
            while context.is_active() and not self._ended.wait(_POLL_S):
                pass

        return grpc.unary_stream_rpc_method_handler(watch)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
