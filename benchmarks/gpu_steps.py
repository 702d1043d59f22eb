"""Runs synthetic requests on one runner of any device and times prefills and decode steps, for `benchmarks.gpu`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cuda.paged_backend import LayerPools, PagedBackend
from decoder_svc.runner.sampled.pending_step import PendingStep
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import (
    AdmittedRequest,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
    StateUse,
)

# Number of alternatives compared per token.
_NUM_LOGPROBS = 5
# Greedy decoding, and what most services ask for.
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, top_k=50, repetition_penalty=1.05),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's token ids, and the log probabilities of the chosen and the likeliest ids at each position."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One batch from its prompts to the last token."""

    answers: list[Answer]
    prefill_s: float
    # Seconds of each step of single tokens.
    decode_s: list[float]


def fill(pools: LayerPools) -> None:
    """Fills the pools of a layer with random numbers; codes get scales of 1/64."""
    for pool, scales in ((pools.keys, pools.key_scales), (pools.values, pools.value_scales)):
        if pools.is_rounded:
            pool.random_(-127, 128)
            scales.fill_(1 / 64)
        else:
            pool.normal_()


class StepDriver:
    """Runs batches of text prompts in one step each and then token by token.

    Like the engine, it launches a step before it reads the tokens of the one before, if runner and requests allow that.
    """

    def __init__(self, runner: ModelRunnerBase, max_batch: int, max_tokens: int, *, use_graphs: bool = True) -> None:
        """`max_tokens` bounds the length of a sequence, prompt and answer together."""
        self.runner = runner
        self._block_size = runner.config.block_size
        self._blocks_each = -(-max_tokens // self._block_size)
        self._num_blocks = max_batch * self._blocks_each
        self._num_runs = 0
        self.use_graphs(use_graphs)

    def use_graphs(self, wanted: bool) -> None:
        """Allocates a new KV cache and records graphs over it if asked."""
        self.runner.config = replace(self.runner.config, use_graphs=wanted)
        self.runner.initialize_kv_cache(self._num_blocks)
        self.runner.capture_model()

    def fill_pools(self) -> None:
        """Fills the KV cache with random numbers, which runs with `num_cached` then read."""
        backend = self.runner.backend
        assert isinstance(backend, PagedBackend), "the backend's pools are private"
        for layer in range(self.runner.get_kv_cache_spec().num_layers):
            fill(backend.pools_of(layer))

    def run(
        self,
        batch: int,
        prompt_tokens: int,
        num_steps: int,
        *,
        num_cached: int = 0,
        params: SamplingParams = SAMPLINGS["greedy"],
        with_logprobs: bool = False,
    ) -> Run:
        """Runs `batch` prompts of `prompt_tokens` tokens, and decodes `num_steps` tokens after the first of each.

        The first `num_cached` tokens of each prompt are not computed: the KV cache is taken to have them.
        """
        params = replace(params, max_tokens=num_steps + 1, logprobs=_NUM_LOGPROBS if with_logprobs else None)
        admitted = self._admitted(batch, prompt_tokens, params)
        names = [each.request_id for each in admitted]
        outputs = [
            SchedulerOutput(admitted, self._prompt_chunks(names, prompt_tokens, num_cached, num_steps), (), (), ())
        ]
        for step in range(num_steps):
            chunks = tuple(self._chunk(slot, name, prompt_tokens + step, 1) for slot, name in enumerate(names))
            outputs.append(SchedulerOutput((), chunks, (), (), ()))
        found, seconds = self._steps(outputs)
        self.runner.execute_model(SchedulerOutput((), (), tuple(names), (), ()))
        return Run([_answer([step[index] for step in found]) for index in range(batch)], seconds[0], seconds[1:])

    def mixed_s(self, batch: int, context: int, chunk_tokens: int, num_steps: int) -> list[float]:
        """Seconds of steps in which `batch` requests decode and a new one brings `chunk_tokens` tokens.

        All have `context` cached tokens. `run` with `max_batch` of at least `batch + 1` has room for them.
        """
        admitted = self._admitted(batch, context + 1, SamplingParams(max_tokens=num_steps + 1))
        names = [each.request_id for each in admitted]
        first = SchedulerOutput(admitted, self._prompt_chunks(names, context + 1, context, num_steps), (), (), ())
        outputs = [first]
        last: tuple[RequestId, ...] = ()
        for step in range(num_steps):
            arrived = self._admitted(1, context + chunk_tokens, SamplingParams(max_tokens=2))
            new = [each.request_id for each in arrived]
            chunks = (
                *(self._chunk(slot, name, context + 1 + step, 1) for slot, name in enumerate(names)),
                *self._prompt_chunks(new, context + chunk_tokens, context, 1, first_index=batch),
            )
            outputs.append(SchedulerOutput(arrived, chunks, last, (), ()))
            last = tuple(new)
        _, seconds = self._steps(outputs)
        self.runner.execute_model(SchedulerOutput((), (), (*names, *last), (), ()))
        return seconds[1:]

    def _steps(self, outputs: Iterable[SchedulerOutput]) -> tuple[list[list[SampledToken]], list[float]]:
        """Returns the tokens of each step, and the seconds from the tokens of the step before to its own."""
        found: list[list[SampledToken]] = []
        seconds: list[float] = []
        noted_s = time.perf_counter()

        def note(tokens: list[SampledToken]) -> None:
            nonlocal noted_s
            # The tokens are on the host now, so the device has finished the step.
            found.append(tokens)
            now_s = time.perf_counter()
            seconds.append(now_s - noted_s)
            noted_s = now_s

        pending: PendingStep | None = None
        for output in outputs:
            if not self.runner.overlaps_steps:
                note(self.runner.execute_model(output))
                continue
            if pending is not None and not pending.may_run_ahead:
                note(pending.tokens())
                pending = None
            launched = self.runner.launch(output)
            if pending is not None:
                note(pending.tokens())
            pending = launched
        if pending is not None:
            note(pending.tokens())
        return found, seconds

    def _admitted(self, batch: int, num_tokens: int, params: SamplingParams) -> tuple[AdmittedRequest, ...]:
        self._num_runs += 1
        draw = random.Random(batch * 10_000 + num_tokens)
        vocab = self.runner.get_model().config.get_text_config().vocab_size
        return tuple(
            AdmittedRequest(
                RequestId(f"{self._num_runs}-{index}"),
                tuple(draw.randrange(vocab) for _ in range(num_tokens)),
                num_tokens,
                (),
                None,
                (),
                replace(params, seed=index),
            )
            for index in range(batch)
        )

    def _prompt_chunks(
        self, names: Sequence[RequestId], prompt_tokens: int, num_cached: int, num_steps: int, first_index: int = 0
    ) -> tuple[ScheduledChunk, ...]:
        """Chunks with the rest of each prompt, and the blocks for everything up to the last token."""
        num_blocks = -(-(prompt_tokens + num_steps) // self._block_size)
        starts = [(first_index + index) * self._blocks_each for index in range(len(names))]
        blocks = [tuple(range(start, start + num_blocks)) for start in starts]
        return tuple(
            self._chunk(first_index + index, name, num_cached, prompt_tokens - num_cached, blocks[index])
            for index, name in enumerate(names)
        )

    def _chunk(
        self, slot: int, name: RequestId, start: int, num_tokens: int, blocks: tuple[int, ...] = ()
    ) -> ScheduledChunk:
        """Returns a chunk of the request with this number, which is also that of its state in recurrent layers."""
        states = None if self.runner.recurrent is None else StateUse(slot, None, ())
        return ScheduledChunk(name, start, num_tokens, 0, 0, blocks, samples=True, states=states)


def median_and_spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, and the tenth and ninetieth percentile."""
    tenths = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64))
    middle, low, high = tenths.tolist()
    return middle, low, high


def _answer(tokens: Sequence[SampledToken]) -> Answer:
    logprobs = tuple({} if token.logprobs is None else dict(token.logprobs.top) for token in tokens)
    return Answer(tuple(token.token_id for token in tokens), logprobs)


def largest_difference(one: Sequence[Answer], other: Sequence[Answer]) -> tuple[float, int]:
    """Returns the largest distance between log probabilities that both have, and the number of positions compared.

    Positions after the first differing token have another context and are not compared. The distance is infinite where
    none of the likeliest tokens is the same.
    """
    largest, num_places = 0.0, 0
    for first, second in zip(one, other, strict=True):
        places = zip(first.token_ids, second.token_ids, first.logprobs, second.logprobs, strict=True)
        for id_a, id_b, logprobs_a, logprobs_b in places:
            shared = logprobs_a.keys() & logprobs_b.keys()
            distances = [abs(logprobs_a[each] - logprobs_b[each]) for each in shared]
            largest = max([largest, *(distances or [math.inf])])
            num_places += 1
            if id_a != id_b:
                break
    return largest, num_places
