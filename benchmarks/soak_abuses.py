"""Abuses a fleet as a hostile tenant, in a process of its own: large, silent, many and refused calls.

It reads one JSON line per abuse from its input and answers each with the number of its calls by status.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from benchmarks.wire_format import field, nested
from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb
from lookonce.status_codes import from_rpc_error, status_row

_MIB = 1 << 20
_GENERATE = "/lookonce.decoder.v1.DecoderService/Generate"
_LOAD = "/lookonce.decoder.v1.DecoderService/GetLoad"
_ENCODE = "/lookonce.encoder.v1.EncoderService/Encode"
_HEALTH = "/grpc.health.v1.Health/Check"
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
_TIMEOUT_S = 20.0
_GRACE_S = 5.0
_SILENT_S = 3.0
_WEBP_SIDE = 7000


@dataclass(frozen=True, slots=True)
class Abuser:
    """The addresses that are abused, the abuser's token, and the size of the abuses."""

    decoder: str
    encoder: str
    token: str
    # Share of the full size.
    scale: float = 1.0

    async def run(self, name: str) -> dict[str, int]:
        """Returns the number of calls by status; of silent connections, those that the server still held."""
        return dict(await ABUSES[name](self))

    def count(self, full: int) -> int:
        """Returns a number of calls or bytes, scaled."""
        return max(1, int(full * self.scale))

    async def calls(
        self, target: str, method: str, requests: Sequence[bytes], *, has_token: bool = True
    ) -> Counter[str]:
        """Sends all at once on one connection."""
        metadata = (("authorization", f"Bearer {self.token}"),) if has_token else ()
        async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
            call: Any = channel.unary_unary(method)
            ends = (_end(call(request, metadata=metadata, timeout=_TIMEOUT_S)) for request in requests)
            return Counter(await asyncio.gather(*ends))


async def _end(call: Any) -> str:
    try:
        await asyncio.wait_for(call, _TIMEOUT_S + _GRACE_S)
    except grpc.RpcError as error:
        row = status_row(from_rpc_error(error))
        return f"{row.code.name} {row.reason}"
    except TimeoutError:
        return "hung"
    return "OK"


async def _empty_parts(abuser: Abuser) -> Counter[str]:
    """Sends a chat of millions of empty parts."""
    parts = decoder_pb.ChatMessage(role=decoder_pb.ROLE_USER, parts=[decoder_pb.ContentPart()]).SerializeToString()
    empty = decoder_pb.ChatMessage(parts=[decoder_pb.ContentPart()]).SerializeToString()
    message = parts + empty * (abuser.count(30 * _MIB) // len(empty))
    chat = nested(decoder_pb.ChatPrompt.DESCRIPTOR, "messages", message)
    request = nested(
        decoder_pb.GenerateRequest.DESCRIPTOR, "params", nested(decoder_pb.GenerateParams.DESCRIPTOR, "chat", chat)
    )
    return await abuser.calls(abuser.decoder, _GENERATE, [request])


async def _without_token(abuser: Abuser) -> Counter[str]:
    request = _encode(bytes(abuser.count(30 * _MIB)))
    return await abuser.calls(abuser.encoder, _ENCODE, [request] * 20, has_token=False)


async def _silent(abuser: Abuser) -> Counter[str]:
    """Connects to both ports and says nothing."""
    ends: Counter[str] = Counter()
    for target in (abuser.decoder, abuser.encoder):
        host, _, port = target.rpartition(":")
        pairs = [asyncio.open_connection(host, int(port)) for _ in range(abuser.count(300))]
        opened = await asyncio.wait_for(asyncio.gather(*pairs, return_exceptions=True), _TIMEOUT_S)
        ends += Counter(await asyncio.gather(*(_held(one, _SILENT_S * abuser.scale) for one in opened)))
    return ends


async def _held(opened: tuple[asyncio.StreamReader, asyncio.StreamWriter] | BaseException, seconds: float) -> str:
    """Says whether the server still holds a connection after so many seconds; ends it."""
    if isinstance(opened, BaseException):
        return "refused"
    reader, writer = opened
    try:
        await asyncio.wait_for(reader.read(), seconds)
    except TimeoutError:
        return "held"
    except OSError:
        pass
    finally:
        writer.transport.abort()
    return "closed"


async def _large_webps(abuser: Abuser) -> Counter[str]:
    """Sends files of 34 bytes whose headers claim 49 megapixels."""
    requests = [_encode(webp_of_34_bytes()) for _ in range(abuser.count(100))]
    return await abuser.calls(abuser.encoder, _ENCODE, requests)


def webp_of_34_bytes() -> bytes:
    """Returns a new file that claims 49 megapixels."""
    size = (_WEBP_SIDE - 1) | (_WEBP_SIDE - 1) << 14
    lossless = b"\x2f" + struct.pack("<I", size) + os.urandom(9)
    body = b"WEBPVP8L" + struct.pack("<I", len(lossless)) + lossless
    return b"RIFF" + struct.pack("<I", len(body)) + body


async def _refused_images(abuser: Abuser) -> Counter[str]:
    num_bytes = abuser.count(19 * _MIB)
    requests = [_encode(b"\x89PNG\r\n\x1a\n" + os.urandom(num_bytes)) for _ in range(8)]
    return await abuser.calls(abuser.encoder, _ENCODE, requests)


async def _many_calls(abuser: Abuser) -> Counter[str]:
    return await abuser.calls(abuser.decoder, _LOAD, [b""] * abuser.count(3000))


async def _large_health(abuser: Abuser) -> Counter[str]:
    ends: Counter[str] = Counter()
    # Field 1, the name of the service.
    request = field(1, bytes(abuser.count(30 * _MIB)))
    for target in (abuser.decoder, abuser.encoder):
        ends += await abuser.calls(target, _HEALTH, [request] * 2, has_token=False)
    return ends


ABUSES: dict[str, Callable[[Abuser], Awaitable[Counter[str]]]] = {
    "30 MiB of empty parts": _empty_parts,
    "20 uploads without a token": _without_token,
    "300 silent connections on each port": _silent,
    "WebPs of 34 bytes and 49 megapixels": _large_webps,
    "refused images of 19 MB": _refused_images,
    "3,000 calls on one connection": _many_calls,
    "large messages to Health/Check": _large_health,
}


def _encode(data: bytes) -> bytes:
    item = encoder_pb.EncodeItem(image=common_pb2.ImageSource(data=data))
    return encoder_pb.EncodeRequest(items=[item]).SerializeToString()


def main() -> None:
    """Serves abuses until the input ends. The arguments are JSON: those of Abuser."""
    abuser = Abuser(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        print(json.dumps(asyncio.run(abuser.run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
