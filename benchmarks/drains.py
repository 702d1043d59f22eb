"""What do calls in flight hear when their decoder ends by SIGTERM? `--help` lists the options.

Clients send bursts of short calls, streams and refused calls. In the middle of each burst, while they still send, the
decoder gets SIGTERM. Every call must be answered, or refused with a reason: a status without one, such as gRPC's
CANCELLED, does not tell the client that it may send the call to another replica.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import pathlib
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import grpc.aio

from benchmarks import report
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import LookonceError
from lookonce.local.local_stack import LocalStack
from lookonce.status_codes import from_rpc_error

_NAME = "drains"
_MODEL = pathlib.Path(__file__).parents[1] / "models/demo"
_SERVICE = "/lookonce.decoder.v1.DecoderService"
_ONE_THREAD = ["--num-threads", "1"]
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
_TIMEOUT_S = 60.0
_LOOK_S = 0.02
# The clients send for about so long, seconds. The signal comes in the middle of it.
_SENDING_S = 0.6
_NUM_TOKENS = 8
_OK = "OK"
_FOREIGN = " of gRPC: "
_ADDRESS = re.compile(r"(ipv4:)?[0-9.]+:[0-9]+")
_TEXT_LENGTH = 60


@dataclass(slots=True)
class Burst:
    """The ends of the calls of one burst."""

    drain_delay_s: float
    num_connections: int
    # By status and reason.
    ends: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="in each burst (default: %(default)s)")
    parser.add_argument("--bursts", type=int, default=4, help="of each setup; half with a delay (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    num_calls, num_bursts, connections = arguments.calls, arguments.bursts, [1, 4, 20]
    if arguments.quick:
        num_calls, num_bursts, connections = 60, 1, [4]
    bursts = []
    for delay_s, repeats in ((0.0, num_bursts), (1.0, num_bursts // 2)):
        if repeats:
            bursts += measure(delay_s, connections * repeats, num_calls)
    figures = {"model": _MODEL.name, "bursts": [asdict(one) for one in bursts]}
    report.publish(_NAME, figures, section(bursts), is_quick=arguments.quick)


def measure(drain_delay_s: float, connections: Sequence[int], num_calls: int) -> list[Burst]:
    """Ends a decoder in one burst after the other, each on so many connections, and starts it again."""
    bursts = []
    flags = [*_ONE_THREAD, "--drain-delay-s", str(drain_delay_s)]
    with LocalStack(_MODEL, encoder_arguments=_ONE_THREAD, decoder_arguments=flags) as stack:
        for number, num_connections in enumerate(connections):
            decoder = stack.decoders[0]
            burst = Burst(drain_delay_s, num_connections)
            asyncio.run(_run(burst, decoder.ready.target, decoder.pid, num_calls, random.Random(number)))
            bursts.append(burst)
            print(asdict(burst), flush=True)
            while decoder.returncode is None:
                time.sleep(_LOOK_S)
            if number + 1 == len(connections):
                break
            new = stack.restart(decoder)
            while not new.is_ready():
                time.sleep(_LOOK_S)
    return bursts


async def _run(burst: Burst, target: str, pid: int, num_calls: int, chance: random.Random) -> None:
    async with AsyncExitStack() as exits:
        channels = [
            await exits.enter_async_context(grpc.aio.insecure_channel(target, options=_OPTIONS))
            for _ in range(burst.num_connections)
        ]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        calls = []
        is_signalled = False
        for number, channel in zip(range(num_calls), itertools.cycle(channels), strict=False):
            if number >= num_calls // 2 and not is_signalled:
                is_signalled = True
                os.kill(pid, signal.SIGTERM)
            calls.append(asyncio.create_task(_ended(channel, chance.choice(_KINDS))))
            if number % 10 == 9:
                await asyncio.sleep(_SENDING_S * 10 / num_calls)
        ends = await asyncio.gather(*calls)
    burst.ends = dict(Counter(end for end, _ in ends).most_common())
    burst.longest_s = max(duration_s for _, duration_s in ends)


async def _ended(channel: Any, kind: tuple[str, Any, bool]) -> tuple[str, float]:
    """Returns the status and reason of one call, and its duration in seconds."""
    method, request, is_stream = kind
    began_s = time.monotonic()
    start = channel.unary_stream if is_stream else channel.unary_unary
    call = start(f"{_SERVICE}/{method}", request_serializer=lambda message: message.SerializeToString())(
        request, timeout=_TIMEOUT_S
    )
    try:
        if is_stream:
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return _end_of(from_rpc_error(error)), time.monotonic() - began_s
    return _OK, time.monotonic() - began_s


def _end_of(error: LookonceError) -> str:
    if error.text_is_foreign:
        return f"{error.code}{_FOREIGN}{_ADDRESS.sub('', error.message)[:_TEXT_LENGTH].strip()}"
    return f"{error.code} {error.reason}"


def _params(**fields: Any) -> pb.GenerateParams:
    sampling = pb.SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
    return pb.GenerateParams(chat=_CHAT, sampling=sampling, **fields)


_CHAT = pb.ChatPrompt(
    messages=[pb.ChatMessage(role=pb.ROLE_USER, parts=[pb.ContentPart(text="Tell me about a shape.")])]
)
# Method, request, and whether the answer is a stream. The last one is refused by itself.
_KINDS = [
    ("GetLoad", pb.GetLoadRequest(), False),
    ("Tokenize", pb.TokenizeRequest(chat=_CHAT), False),
    ("Generate", pb.GenerateRequest(params=_params()), False),
    ("GenerateStream", pb.GenerateStreamRequest(params=_params()), True),
    ("Generate", pb.GenerateRequest(), False),
]


def section(bursts: Sequence[Burst]) -> str:
    """Returns the section of RESULTS.md."""
    rows = []
    setups = dict.fromkeys((one.drain_delay_s, one.num_connections) for one in bursts)
    for setup in setups:
        found = [one for one in bursts if (one.drain_delay_s, one.num_connections) == setup]
        ends = sum((Counter(one.ends) for one in found), Counter[str]())
        told = sum(number for end, number in ends.items() if end != _OK and _FOREIGN not in end)
        unsent = sum(number for end, number in ends.items() if end.startswith(f"UNAVAILABLE{_FOREIGN}"))
        other = ends.total() - ends[_OK] - told - unsent
        longest_s = max(one.longest_s for one in found)
        rows.append((*setup, len(found), ends.total(), ends[_OK], told, unsent, other, f"{longest_s:.1f} s"))
    head = [
        "drain delay, s", "connections", "bursts", "calls", "answered", "refused with a reason",
        "UNAVAILABLE of gRPC", "others, such as CANCELLED", "longest call",
    ]  # fmt: skip
    return f"""## {_NAME}

Bursts of mixed calls, in the middle of which a decoder of the demo model gets SIGTERM. gRPC itself says UNAVAILABLE to
a call that waits in its client for one of the 256 places of a connection that ends, or that finds no connection any
more: the decoder never had it. Goal: no other end without a reason.

{report.table(head, rows)}"""


if __name__ == "__main__":
    main()
