"""A gRPC server that answers as the caller's test says, and caches images as the services do.

with FakeServer("a red square") as server, lookonce.Client.connect(server.target) as client:
    assert client.generate("What is it?", images=["cat.png"]).text == "a red square"
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc

from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.encoder.v1 import encoder_service_pb2_grpc as encoder_grpc
from lookonce.errors import LookonceError
from lookonce.testing.fake_decoder import Answer, FakeDecoder
from lookonce.testing.fake_encoder import FakeEncoder
from lookonce.testing.fake_request import FakeRequest
from lookonce.testing.known_images import KnownImages

_NUM_THREADS = 32
_MAX_MESSAGE_BYTES = 32 << 20


class FakeServer:
    """A decoder and an encoder behind one target of this machine, in threads of this process.

    A token is a word. An image has always the same number of rows, and is known by its digest once its bytes were sent.
    Videos, structured output and operators' calls are not offered.
    """

    def __init__(self, answer: Answer = "an answer", *, rows_per_image: int = 16) -> None:
        self.images = KnownImages(rows_per_image)
        self._decoder = FakeDecoder(answer, self.images, _MAX_MESSAGE_BYTES)
        self._server: grpc.Server | None = None
        self._target = ""

    @property
    def target(self) -> str:
        """Address of both services. Raises RuntimeError before the start."""
        if not self._target:
            raise RuntimeError("the server has not started: use `with`, or call start")
        return self._target

    @property
    def requests(self) -> list[FakeRequest]:
        """The generate requests so far, in the order of their arrival; those that failed, too."""
        return list(self._decoder.requests)

    def fail(self, *errors: LookonceError) -> None:
        """Makes the next generate requests fail, one with each error, instead of being answered."""
        self._decoder.failures.extend(errors)

    def start(self) -> None:
        """Listens on a free port of this machine."""
        server = grpc.server(
            ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fake-server"),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)],
        )
        decoder_grpc.add_DecoderServiceServicer_to_server(self._decoder, server)
        encoder_grpc.add_EncoderServiceServicer_to_server(FakeEncoder(self.images, _MAX_MESSAGE_BYTES), server)
        self._target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self._decoder.target = self._target
        server.start()
        self._server = server

    def close(self) -> None:
        """Ends all calls and the server."""
        if self._server is not None:
            self._server.stop(None).wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
