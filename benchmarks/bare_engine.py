"""`python -m benchmarks.bare_engine`: serves token ids from the decoder's engine alone, without a service around it.

The flags are the decoder's. Each line of standard input is a set of requests as token ids; each line of standard
output holds their times. No text is tokenized and nothing is sent over a network.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.settings import DecoderSettings
from lookonce.model.libraries.lean_transformers import import_lean_transformers
from lookonce.server.settings_parser import parse_settings

if TYPE_CHECKING:
    from decoder_svc.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class TokenRequests:
    """A set of requests that begin together."""

    # Token ids of each request.
    prompts: tuple[tuple[int, ...], ...]
    # Tokens that each request generates.
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Measured times of one set of requests, in seconds."""

    # Time to first token of each request.
    first_token_s: tuple[float, ...]
    # From the first request's beginning to the last one's end.
    duration_s: float
    # User and system time of the process that has the engine.
    engine_cpu_s: float
    # CPU time of the process that reads the answers, if it is a separate one.
    reader_cpu_s: float = 0.0


async def run_requests(engine: Engine, requests: TokenRequests, name: str) -> RequestTimes:
    """Runs all requests at once, each read by its own task. Request ids begin with `name`."""

    async def one(index: int) -> float:
        stream = engine.submit(
            RequestId(f"{name}-{index}"),
            Prompt(requests.prompts[index]),
            SamplingParams(max_tokens=requests.num_tokens),
        )
        first_s, num_tokens = 0.0, 0
        async for output in stream:
            if output.token_ids and not num_tokens:
                first_s = time.monotonic() - started_s
            num_tokens += len(output.token_ids)
        assert num_tokens == requests.num_tokens, "nothing ends a request early"
        return first_s

    cpu_s, started_s = time.process_time(), time.monotonic()
    first_token_s = await asyncio.gather(*(one(index) for index in range(len(requests.prompts))))
    return RequestTimes(tuple(first_token_s), time.monotonic() - started_s, time.process_time() - cpu_s)


async def serve(arguments: Sequence[str]) -> None:
    """Runs the sets of requests from standard input, one after another, until end of file."""
    # The services import it this way, too.
    import_lean_transformers()
    from decoder_svc.assembly import build_engine
    from decoder_svc.constraint.folder_vocabulary import folder_vocabulary
    from decoder_svc.device_choice import choose_device
    from decoder_svc.rows.fetch_metrics import FetchMetrics
    from decoder_svc.service import load_text

    settings = parse_settings(DecoderSettings, arguments, "bare_engine")
    engine = build_engine(
        settings,
        choose_device(settings),
        load_text(settings).family,
        None,
        None,
        FetchMetrics(CollectorRegistry()),
        functools.partial(folder_vocabulary, settings.model),
        process=None,
    )
    gc.collect()
    gc.freeze()
    engine.start()
    print("ready", flush=True)
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        requests = TokenRequests(tuple(map(tuple, told["prompts"])), told["num_tokens"])
        print(json.dumps(asdict(await run_requests(engine, requests, str(number)))), flush=True)
        number += 1
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
