"""How long does a small picture wait behind images that are expensive to decode? `--help` lists the options.

A caller sends forty files of 34 bytes at once, each a WebP of 7000 × 7000 pixels, which takes seconds of a processor to
decode. Then small new pictures are encoded, one after another, for the same tenant and for another one.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import pathlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
from PIL import Image

from benchmarks import report
from benchmarks.soak_abuses import webp_of_34_bytes
from lookonce.common.v1 import common_pb2
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.local.local_stack import LocalStack, RedisSource
from lookonce.local.token_entry import new_token
from lookonce.status_codes import from_rpc_error

_NAME = "giants"
_MODEL = pathlib.Path(__file__).parents[1] / "models/demo"
_ENCODE = "/lookonce.encoder.v1.EncoderService/Encode"
_SENDER, _OTHER = "sender", "other"
_NUM_SMALL = 5
_SMALL_PIXELS = 64
# Until the giants have arrived, seconds.
_PAUSE_S = 0.2
_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Round:
    """Times of small pictures in seconds, alone and behind giants, and the ends of the giants by status."""

    alone_s: list[float]
    same_tenant_s: list[float]
    other_tenant_s: list[float]
    giants: dict[str, int]


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--giants", type=int, default=40, help="sent at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    num_giants, num_rounds = (1, 1) if arguments.quick else (arguments.giants, arguments.rounds)
    rounds = measure(num_giants, num_rounds)
    figures = {"model": _MODEL.name, "num_giants": num_giants, "rounds": [asdict(one) for one in rounds]}
    report.publish(_NAME, figures, section(rounds, num_giants), is_quick=arguments.quick)


def measure(num_giants: int, num_rounds: int) -> list[Round]:
    """Sends giants and small pictures to an encoder with two tenants, in one round after the other."""
    with tempfile.TemporaryDirectory(prefix="lookonce-giants-") as folder:
        tokens = {}
        path = pathlib.Path(folder, "tokens.toml")
        with path.open("w") as file:
            for tenant in (_SENDER, _OTHER):
                tokens[tenant], entry = new_token(tenant, tenant, "client")
                file.write(entry)
        flags = ["--num-threads", "1", "--auth-tokens-file", str(path)]
        with LocalStack(_MODEL, num_decoders=0, redis=RedisSource.NONE, encoder_arguments=flags) as stack:
            return asyncio.run(_measure(stack.encoder_targets[0], tokens, num_giants, num_rounds))


async def _measure(target: str, tokens: dict[str, str], num_giants: int, num_rounds: int) -> list[Round]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(target, options=options) as giants,
        grpc.aio.insecure_channel(target, options=options) as small,
    ):
        rounds = []
        for number in range(num_rounds):
            sending = _Sender(small, tokens, number)
            alone_s = [await sending.small(_SENDER, "alone", index) for index in range(_NUM_SMALL)]
            asking = [
                asyncio.create_task(_end_of(giants, webp_of_34_bytes(), tokens[_SENDER])) for _ in range(num_giants)
            ]
            await asyncio.sleep(_PAUSE_S)
            same_s, other_s = [], []
            for index in range(_NUM_SMALL):
                same_s.append(await sending.small(_SENDER, "same", index))
                other_s.append(await sending.small(_OTHER, "other", index))
            ends = dict(Counter(await asyncio.gather(*asking)))
            rounds.append(Round(alone_s, same_s, other_s, ends))
            print(asdict(rounds[-1]), flush=True)
        return rounds


class _Sender:
    """Sends small pictures that nobody has sent before."""

    def __init__(self, channel: Any, tokens: dict[str, str], number: int) -> None:
        self._channel = channel
        self._tokens = tokens
        self._number = number

    async def small(self, tenant: str, name: str, index: int) -> float:
        """Returns the time of one picture in seconds."""
        chance = np.random.default_rng(list(f"{name} {self._number} {index}".encode()))
        file = io.BytesIO()
        Image.fromarray(chance.integers(0, 256, (_SMALL_PIXELS, _SMALL_PIXELS, 3), np.uint8)).save(file, "PNG")
        began_s = time.monotonic()
        end = await _end_of(self._channel, file.getvalue(), self._tokens[tenant])
        if end != "OK":
            raise RuntimeError(f"a small picture was not encoded: {end}")
        return time.monotonic() - began_s


async def _end_of(channel: Any, data: bytes, token: str) -> str:
    """Encodes one image. Returns the status of the call, with its reason."""
    request = pb.EncodeRequest(items=[pb.EncodeItem(image=common_pb2.ImageSource(data=data))])
    metadata = (("authorization", f"Bearer {token}"),)
    try:
        await channel.unary_unary(_ENCODE)(request.SerializeToString(), metadata=metadata, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        refusal = from_rpc_error(error)
        return f"{refusal.code} {refusal.reason}"
    return "OK"


def section(rounds: Sequence[Round], num_giants: int) -> str:
    """Returns the section of RESULTS.md."""
    rows = []
    for name, by_round in (
        ("alone", [one.alone_s for one in rounds]),
        ("same tenant", [one.same_tenant_s for one in rounds]),
        ("other tenant", [one.other_tenant_s for one in rounds]),
    ):
        times_s = [seconds for found in by_round for seconds in found]
        longest = " ".join(f"{max(found):.2f}" for found in by_round)
        rows.append((name, len(times_s), f"{statistics.median(times_s):.3f}", f"{max(times_s):.3f}", longest))
    ends = sum((Counter(one.giants) for one in rounds), Counter[str]())
    head = ["small pictures", "number", "median, s", "longest, s", "longest of each round, s"]
    return f"""## {_NAME}

A small new picture at the encoder of the demo model, alone and while {num_giants} files of 34 bytes wait that claim
7000 × 7000 pixels each. Those ended with: {", ".join(f"{end} {number}" for end, number in ends.most_common())}.

{report.table(head, rows)}"""


if __name__ == "__main__":
    main()
