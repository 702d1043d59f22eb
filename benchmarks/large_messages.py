"""How long does one large message keep everybody else from an answer? `--help` lists the options.

To each method of a decoder and an encoder, one after another, go the largest messages that its fields allow: millions
of empty elements, long texts, bytes and numbers, unknown fields. They are made from the contract's descriptors, so that
no new field is forgotten. Beside them a client in a process of its own calls the same service without a pause. The
longest of its calls while a message is on its way is the stall. Stretches of the same length without a message tell
what the machine itself does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from benchmarks import report
from benchmarks.wire_format import field, nested, varint
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb
from lookonce.local.local_stack import LocalStack

_NAME = "large_messages"
_MODEL = pathlib.Path(__file__).parents[1] / "models/demo"
_ONE_THREAD = ["--num-threads", "1"]
_MIB = 1 << 20
# The largest message of a service, and the bounds on text and on numbers within one. Each less the fields around it.
_SIZES = [32 * _MIB - 1024, 4 * _MIB - 1024, _MIB - 1024]
_GOAL_S = 0.05
_TIMEOUT_S = 20.0
# After each message, until the watching client looks away.
_ECHO_S = 0.05
# Sub-messages of sub-messages.
_MAX_DEPTH = 5
_UNKNOWN_FIELD = 500
_UNARY, _STREAM = "unary", "stream"
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
_SERVICES = {
    "decoder": (decoder_pb.DESCRIPTOR, "/lookonce.decoder.v1.DecoderService/GetLoad"),
    "encoder": (encoder_pb.DESCRIPTOR, "/lookonce.encoder.v1.EncoderService/GetEncoderInfo"),
}
_EVERYWHERE = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest call of the watching client during one message, or during a stretch without one."""

    service: str
    # Method, field and size; "calm" without a message.
    message: str
    # The message's status.
    status: str
    longest_s: float
    num_calls: int


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        rounds = [measure(_SIZES[-1:], methods=("Encode", "Detokenize", "Check"))]
    else:
        rounds = [measure(_SIZES) for _ in range(arguments.rounds)]
    figures = {"rounds": [[asdict(stall) for stall in stalls] for stalls in rounds]}
    report.publish(_NAME, figures, section(rounds), is_quick=arguments.quick)


def measure(sizes: Sequence[int], methods: Sequence[str] = ()) -> list[Stall]:
    """Sends every message once to new services: those of some methods, or by default of all."""
    with LocalStack(_MODEL, encoder_arguments=_ONE_THREAD, decoder_arguments=_ONE_THREAD) as stack:
        targets = {"decoder": stack.decoder_targets[0], "encoder": stack.encoder_targets[0]}
        return [stall for service, target in targets.items() for stall in _stalls_of(service, target, sizes, methods)]


def _stalls_of(service: str, target: str, sizes: Sequence[int], methods: Sequence[str]) -> list[Stall]:
    windows: list[tuple[str, str, float, float]] = []
    with _watching(target, _SERVICES[service][1]) as calls:
        for method, size in itertools.product(_methods_of(service, methods), sizes):
            for name, message in messages(method.input_type, size):
                begin_s = time.monotonic()
                status = asyncio.run(_send(target, method, message))
                time.sleep(_ECHO_S)
                end_s = time.monotonic()
                windows.append((f"{method.name} {name}, {size / _MIB:.0f} MiB", status, begin_s, end_s))
                time.sleep(end_s - begin_s)
                windows.append(("calm", "", end_s, time.monotonic()))
        found = calls()
    stalls = []
    for message_name, status, begin_s, end_s in windows:
        durations_s = [stop_s - start_s for start_s, stop_s in found if stop_s > begin_s and start_s < end_s]
        stalls.append(Stall(service, message_name, status, max(durations_s), len(durations_s)))
    return stalls


def _methods_of(service: str, names: Sequence[str]) -> list[MethodDescriptor]:
    services = [one for file in (_SERVICES[service][0], *_EVERYWHERE) for one in file.services_by_name.values()]
    return [method for one in services for method in one.methods if not names or method.name in names]


@contextlib.contextmanager
def _watching(target: str, method: str) -> Iterator[Any]:
    """Runs the watching client. Yields a function that ends it and returns beginning and end of each of its calls."""
    command = [sys.executable, "-m", "benchmarks.watching_client", target, method]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield lambda: json.loads(process.communicate("\n")[0])


async def _send(target: str, method: MethodDescriptor, message: bytes) -> str:
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        call = await _called(channel, path, method, message)
        if call.done():
            return str((await call.code()).name)
        call.cancel()
        return "STREAMING"


async def _called(channel: Any, path: str, method: MethodDescriptor, message: bytes) -> Any:
    """Sends the message and waits for the end of the call, or for its first answer if it has several."""
    proto: Any = method
    is_stream, has_answers = proto.client_streaming, proto.server_streaming
    kind = f"{_STREAM if is_stream else _UNARY}_{_STREAM if has_answers else _UNARY}"
    start: Any = getattr(channel, kind)(path)
    call = start(iter([message]), timeout=_TIMEOUT_S) if is_stream else start(message, timeout=_TIMEOUT_S)
    with contextlib.suppress(grpc.RpcError):
        if has_answers:
            await call.read()
        else:
            await call
    return call


def messages(descriptor: Descriptor, num_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yields encoded messages of about `num_bytes`, each filled by one field at some depth, with a name."""
    yield "unknown bytes", field(_UNKNOWN_FIELD, bytes(num_bytes))
    yield "unknown numbers", _repeated(varint(_UNKNOWN_FIELD << 3) + b"\x01", num_bytes)
    yield from _filled(descriptor, num_bytes, 0)


def _filled(descriptor: Descriptor, num_bytes: int, depth: int) -> Iterator[tuple[str, bytes]]:
    for one in descriptor.fields:
        if one.message_type is not None:
            yield f"{one.name} empty", _repeated(field(one.number, b""), num_bytes)
            if depth < _MAX_DEPTH and one.message_type is not descriptor:
                for name, content in _filled(one.message_type, num_bytes, depth + 1):
                    yield f"{one.name}.{name}", nested(descriptor, one.name, content)
        elif one.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING):
            yield f"{one.name} long", field(one.number, b" " * num_bytes)
            yield f"{one.name} empty", _repeated(field(one.number, b""), num_bytes)
        elif one.is_repeated:
            yield f"{one.name} packed", field(one.number, bytes(num_bytes))


def _repeated(element: bytes, num_bytes: int) -> bytes:
    return element * (num_bytes // len(element))


def section(rounds: Sequence[Sequence[Stall]]) -> str:
    """Returns the section of RESULTS.md."""
    rows = []
    for service in _SERVICES:
        ours = [[one for one in stalls if one.service == service] for stalls in rounds]
        for kind, is_calm in (("messages", False), ("no message", True)):
            longest = [[one.longest_s for one in stalls if (one.message == "calm") == is_calm] for stalls in ours]
            num_over = [sum(one > _GOAL_S for one in found) for found in longest]
            everything = [one for found in longest for one in found]
            rows.append([
                service, kind, len(longest[0]),
                _ms(statistics.median(everything)),
                " ".join(_ms(max(found)) for found in longest),
                " ".join(str(one) for one in num_over),
            ])  # fmt: skip
    head = ["service", "during", "stretches", "median, ms", "longest of each round, ms", "over 50 ms"]
    worst = _worst(rounds)
    return (
        f"## {_NAME}\n\nThe longest call of a client that calls on and on, while one large message is on its way to "
        f"the same service. Goal: no message stalls others for more than {_ms(_GOAL_S)} ms.\n\n"
        f"{report.table(head, rows)}\n\nThe messages with the longest stalls, by the median of their rounds:\n\n"
        f"{report.table(['service', 'message', 'status', 'ms, each round'], worst)}"
    )


def _worst(rounds: Sequence[Sequence[Stall]]) -> list[list[str]]:
    """Returns the five messages with the longest stalls."""
    by_message = [stalls for stalls in zip(*rounds, strict=True) if stalls[0].message != "calm"]
    by_message.sort(key=lambda stalls: -statistics.median(one.longest_s for one in stalls))
    return [
        [stalls[0].service, stalls[0].message, stalls[0].status, " ".join(_ms(one.longest_s) for one in stalls)]
        for stalls in by_message[:5]
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    main()
