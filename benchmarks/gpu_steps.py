"""Runs synthetic requests on one runner of any device and times prefills and decode steps, for `benchmarks.gpu`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, SampledToken, ScheduledChunk, SchedulerOutput

# Number of alternatives compared per token.
_NUM_LOGPROBS = 5


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


class StepDriver:
    """Runs batches of text prompts in one step each and then token by token."""

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

    def run(self, batch: int, prompt_tokens: int, num_steps: int, *, with_logprobs: bool = False) -> Run:
        """Runs `batch` prompts of `prompt_tokens` tokens, and decodes `num_steps` tokens after the first of each."""
        self._num_runs += 1
        names = [RequestId(f"{self._num_runs}-{index}") for index in range(batch)]
        draw = random.Random(batch * 10_000 + prompt_tokens)
        vocab = self.runner.get_model().config.get_text_config().vocab_size
        params = SamplingParams(max_tokens=num_steps + 1, logprobs=_NUM_LOGPROBS if with_logprobs else None)
        admitted = tuple(
            AdmittedRequest(
                name, tuple(draw.randrange(vocab) for _ in range(prompt_tokens)), prompt_tokens, (), None, (), params
            )
            for name in names
        )
        found: list[list[SampledToken]] = []
        seconds = []
        for step in range(num_steps + 1):
            chunks = tuple(self._chunk(name, index, prompt_tokens, step, num_steps) for index, name in enumerate(names))
            output = SchedulerOutput(admitted if step == 0 else (), chunks, (), (), ())
            started_s = time.perf_counter()
            # execute_model returns sampled ids on the host, so the device has finished.
            found.append(self.runner.execute_model(output))
            seconds.append(time.perf_counter() - started_s)
        self.runner.execute_model(SchedulerOutput((), (), tuple(names), (), ()))
        answers = [_answer([step[index] for step in found]) for index in range(batch)]
        return Run(answers, seconds[0], seconds[1:])

    def _chunk(self, name: RequestId, index: int, prompt_tokens: int, step: int, num_steps: int) -> ScheduledChunk:
        first = index * self._blocks_each
        start = 0 if step == 0 else prompt_tokens + step - 1
        num_blocks = -(-(prompt_tokens + num_steps) // self._block_size)
        blocks = tuple(range(first, first + num_blocks)) if step == 0 else ()
        return ScheduledChunk(name, start, prompt_tokens if step == 0 else 1, 0, 0, blocks, samples=True)


def _answer(tokens: Sequence[SampledToken]) -> Answer:
    logprobs = tuple({} if token.logprobs is None else dict(token.logprobs.top) for token in tokens)
    return Answer(tuple(token.token_id for token in tokens), logprobs)


def largest_difference(one: Sequence[Answer], other: Sequence[Answer]) -> tuple[float, int]:
    """Returns the largest distance between log probabilities that both have, and the number of positions compared.

    Positions after the first differing token have another context and are not compared.
    """
    largest, num_places = 0.0, 0
    for first, second in zip(one, other, strict=True):
        places = zip(first.token_ids, second.token_ids, first.logprobs, second.logprobs, strict=True)
        for id_a, id_b, logprobs_a, logprobs_b in places:
            shared = logprobs_a.keys() & logprobs_b.keys()
            largest = max([largest, *(abs(logprobs_a[each] - logprobs_b[each]) for each in shared)])
            num_places += 1
            if id_a != id_b:
                break
    return largest, num_places
