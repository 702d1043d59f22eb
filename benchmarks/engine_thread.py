"""Runs the decoder's engine in this process, without a service, and times sets of requests given as token ids."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from prometheus_client import CollectorRegistry

from decoder_svc.assembly import build_engine
from decoder_svc.constraint.folder_vocabulary import folder_vocabulary
from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.device_choice import choose_device
from decoder_svc.rows.fetch_metrics import FetchMetrics
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import Constraint, SamplingParams
from decoder_svc.service import load_text
from decoder_svc.settings import DecoderSettings
from lookonce.server.settings_parser import parse_settings

_STOP_TIMEOUT_S = 60.0
# Tokens of a request that may come while other requests of the set begin.
_NUM_FIRST_TOKENS = 8
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The times of one request, in seconds."""

    # Seconds from the start of the set to the first token.
    first_token_s: float
    # Seconds from the first token to the last.
    decode_s: float
    # Seconds per token, without the first tokens, which come while other requests begin.
    step_s: float


class EngineThread:
    """An engine and the event loop that submits to it, on a thread of its own."""

    def __init__(self, arguments: Sequence[str], vocabulary: Vocabulary | None = None) -> None:
        """Takes the command-line flags of the decoder. `vocabulary` replaces that of the model's tokenizer."""
        settings = parse_settings(DecoderSettings, arguments, "engine_thread")
        self._engine = build_engine(
            settings,
            choose_device(settings),
            load_text(settings).family,
            None,
            None,
            FetchMetrics(CollectorRegistry()),
            functools.partial(folder_vocabulary, settings.model) if vocabulary is None else lambda: vocabulary,
            process=None,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._num_sets = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        self._loop.close()

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        num_tokens: int,
        constraint: Constraint | None = None,
        temperature: float = 0.0,
    ) -> list[EngineAnswer]:
        """Runs all prompts at once, under a constraint if any; each generates exactly `num_tokens` tokens."""
        self._num_sets += 1
        stop_token_ids = frozenset() if constraint is None else frozenset({2})
        params = SamplingParams(
            max_tokens=num_tokens, stop_token_ids=stop_token_ids, constraint=constraint, temperature=temperature
        )
        return self._call(self._run(prompts, params))

    async def _start(self) -> None:
        self._engine.start()

    async def _run(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> list[EngineAnswer]:
        started_s = time.monotonic()
        return await asyncio.gather(
            *(self._ask(index, prompt, params, started_s) for index, prompt in enumerate(prompts))
        )

    async def _ask(self, index: int, prompt: tuple[int, ...], params: SamplingParams, started_s: float) -> EngineAnswer:
        request_id = RequestId(f"{self._num_sets}-{index}")
        stream = self._engine.submit(request_id, Prompt(prompt), params)
        # The time of each output, with the tokens until then.
        outputs: list[tuple[float, int]] = []
        found = 0
        async for output in stream:
            if output.token_ids:
                found += len(output.token_ids)
                outputs.append((time.monotonic(), found))
        assert found == params.max_tokens, "nothing ends a request early"
        (first_s, _), (last_s, _) = outputs[0], outputs[-1]
        settled_s, num_before = next((each for each in outputs if each[1] >= _NUM_FIRST_TOKENS), outputs[-1])
        step_s = (last_s - settled_s) / (found - num_before) if found > num_before else math.nan
        return EngineAnswer(first_s - started_s, last_s - first_s, step_s)

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
