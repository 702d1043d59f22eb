"""Asks a Lookonce decoder about a picture, with nothing but gRPC and the stubs generated from `protos/`.

    python ask.py 127.0.0.1:50051 picture.png "What is in the picture?"

It sends the picture's SHA-256 first, and the file only if the server does not know the picture. If the server has no
room, it waits for as long as the server says and tries again.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import sys
import time

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc

# Time for all attempts together.
TIMEOUT_S = 60.0
MAX_TOKENS = 64
ERROR_DOMAIN = "lookonce"


def ask(decoder: decoder_grpc.DecoderServiceStub, picture: bytes, question: str) -> decoder_pb2.Usage:
    """Prints the answer while it is generated; returns the counts of its tokens. Raises grpc.RpcError if it fails."""
    end = time.monotonic() + TIMEOUT_S
    digest = hashlib.sha256(picture).digest()
    image = common_pb2.ImageSource(key=common_pb2.ContentKey(digest=digest))
    while True:
        has_text = False
        try:
            for event in decoder.GenerateStream(request(image, question), timeout=end - time.monotonic()):
                if event.HasField("delta"):
                    print(event.delta.text, end="", flush=True)
                    has_text = True
                elif event.HasField("finished"):
                    print()
                    return event.finished.usage
            raise RuntimeError("the stream ended without its last message")
        except grpc.RpcError as error:
            # An attempt that has printed a part of the answer is not repeated: another one would begin again.
            if has_text:
                raise
            reason, pause_s = explain(error)
            if reason == "EMBEDDING_NOT_CACHED" and not image.data:
                print("The server does not know the picture: it gets the file.", file=sys.stderr)
                image = common_pb2.ImageSource(data=picture, expected_digest=digest)
            elif pause_s is not None and time.monotonic() + pause_s < end:
                print(f"The server is busy: next attempt in {pause_s:g} s.", file=sys.stderr)
                time.sleep(pause_s)
            else:
                raise


def request(image: common_pb2.ImageSource, question: str) -> decoder_pb2.GenerateStreamRequest:
    """Returns the request for one question about one image."""
    parts = [decoder_pb2.ContentPart(image=image), decoder_pb2.ContentPart(text=question)]
    message = decoder_pb2.ChatMessage(role=decoder_pb2.ROLE_USER, parts=parts)
    return decoder_pb2.GenerateStreamRequest(
        params=decoder_pb2.GenerateParams(
            chat=decoder_pb2.ChatPrompt(messages=[message]),
            sampling=decoder_pb2.SamplingParams(max_tokens=MAX_TOKENS),
        )
    )


def explain(error: grpc.RpcError) -> tuple[str, float | None]:
    """Returns the reason in a failed call's status, and the pause in seconds that the server asks for, if it does.

    Statuses of gRPC itself, for example when nothing listens, have no reason: it is the name of their code.
    """
    reason, pause_s = error.code().name, None
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            reason = info.reason
        elif detail.Unpack(retry):
            pause_s = retry.retry_delay.ToTimedelta().total_seconds()
    return reason, pause_s


def main() -> int:
    """Returns the exit status: 0 after an answer, 1 after an error, which is printed."""
    parser = argparse.ArgumentParser(description="Asks a Lookonce decoder about a picture.")
    parser.add_argument("target", help="address of the decoder, host:port")
    parser.add_argument("picture", type=pathlib.Path, help="image file")
    parser.add_argument("question")
    arguments = parser.parse_args()
    with grpc.insecure_channel(arguments.target) as channel:
        try:
            usage = ask(decoder_grpc.DecoderServiceStub(channel), arguments.picture.read_bytes(), arguments.question)
        except grpc.RpcError as error:
            print(f"{explain(error)[0]}: {error.details()}", file=sys.stderr)
            return 1
    print(
        f"Image rows: {usage.encoded_image_tokens} encoded, {usage.cached_image_tokens} from the shared cache, "
        f"{usage.skipped_image_tokens} skipped.",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
