"""How much does prompt lookup gain with repetitive answers, and cost without? `--help` lists the options.

Scheduler and runner without services, with drafts and without, take turns on one model; only decoding is timed. The
model has random weights, so answers are scripted: each step is computed as usual, and then the script's token is made
the most likely one. The workload `own` is not scripted: it is the model's own greedy answer.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from benchmarks import models, report
from decoder_svc.prompt.family import load_family
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.runner.step_metadata import PreparedInputs
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import SchedulerLimits
from decoder_svc.scheduling.scheduler_output import ScheduledChunk
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
from lookonce.model.model_folder import ModelFolder
from lookonce.model.pretrained_tokenizer import load_pretrained

_NAME = "speculation"
_BLOCK_SIZE = 16
# Ids that scripts are made of; every model's tokenizer has them.
_WORDS = range(100, 500)
# Tokens in a copied run, and in a run between two copied ones.
_RUN_TOKENS = 8
_SURE = 1e4

Script = tuple[int, ...]
Write = Callable[[random.Random, Script, int], Script]


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch, decoded to its end."""

    # Generated per second, after the first token of each request.
    tokens_per_s: float
    num_steps: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of answers in a batch of one size."""

    workload: str
    batch: int
    without: list[Turn]
    with_guesses: list[Turn]


def copied(draw: random.Random, prompt: Script, num_tokens: int) -> Script:
    """Writes a passage of the prompt, as when text is corrected or code is moved."""
    start = draw.randrange(len(prompt) - num_tokens)
    return prompt[start : start + num_tokens]


def quoting(draw: random.Random, prompt: Script, num_tokens: int) -> Script:
    """Writes an answer of which half are short quotations."""
    words: list[int] = []
    while len(words) < num_tokens:
        start = draw.randrange(len(prompt) - _RUN_TOKENS)
        words += prompt[start : start + _RUN_TOKENS]
        words += draw.choices(_WORDS, k=_RUN_TOKENS)
    return tuple(words[:num_tokens])


def fresh(draw: random.Random, prompt: Script, num_tokens: int) -> Script:
    """Writes an answer that repeats earlier text only by chance."""
    return tuple(draw.choices(_WORDS, k=num_tokens))


def misleading(draw: random.Random, prompt: Script, num_tokens: int) -> Script:
    """Writes few words in random order: most pairs occurred before, but with another continuation."""
    return tuple(draw.choices(_WORDS[:12], k=num_tokens))


# None: what the model itself says.
WORKLOADS: dict[str, Write | None] = {
    "copied": copied,
    "quoting": quoting,
    "own": None,
    "fresh": fresh,
    "misleading": misleading,
}


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per cell, with and without (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--guesses", type=int, default=4, help="speculative_tokens (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=96)
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    folder = models.demo_model() if arguments.quick else models.small_llava()
    if arguments.quick:
        arguments.rounds, arguments.batches = 1, [2]
    bench = SpeculationBench(folder, max(arguments.batches), arguments.prompt_tokens, arguments.answer_tokens)
    cells = []
    for workload in arguments.workloads:
        for batch in arguments.batches:
            cells.append(bench.measure(workload, batch, SpeculationLimits(arguments.guesses), arguments.rounds))
            print(_row(cells[-1]), flush=True)
    figures = {"model": folder.name, "guesses": arguments.guesses, "cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(folder.name, arguments.guesses, cells), is_quick=arguments.quick)


class ScriptedRunner(CPUModelRunner):
    """A runner that computes every step and then returns the script's token."""

    # By request; those that are not here say what the model says.
    scripts: dict[RequestId, Script]

    def _forward(self, inputs: PreparedInputs, chunks: tuple[ScheduledChunk, ...], **how: bool) -> Tensor:
        logits = super()._forward(inputs, chunks, **how)
        line = 0
        for request_id in inputs.flat.sampled_ids:
            row = self.batch[request_id]
            script = self.scripts.get(request_id)
            for context in row.contexts():
                if script is not None:
                    logits[line, script[len(context) - row.num_prompt_tokens]] = _SURE
                line += 1
        return logits


class SpeculationBench:
    """One model, one KV pool, and batches that begin together."""

    def __init__(self, folder: pathlib.Path, max_batch: int, prompt_tokens: int, answer_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._answer_tokens = answer_tokens
        self._max_batch = max_batch
        family = load_family(ModelFolder.open(folder), load_pretrained(folder))
        self._runner = ScriptedRunner(RunnerConfig(folder, None, _BLOCK_SIZE, None), family)
        self._runner.scripts = {}
        self._num_blocks = max_batch * -(-(prompt_tokens + answer_tokens) // _BLOCK_SIZE)
        self._runner.initialize_kv_cache(self._num_blocks)

    def measure(self, workload: str, batch: int, limits: SpeculationLimits, num_rounds: int) -> Cell:
        """In turns, so that a busy machine hits both alike; both say the same in a round."""
        cell = Cell(workload, batch, [], [])
        for number in range(num_rounds + 1):
            for is_guessing in (number % 2 == 0, number % 2 == 1):
                turn = self._decode(workload, batch, limits if is_guessing else NO_SPECULATION, number)
                # The first round is for the caches.
                if number:
                    (cell.with_guesses if is_guessing else cell.without).append(turn)
        return cell

    def _decode(self, workload: str, batch: int, limits: SpeculationLimits, number: int) -> Turn:
        scheduler = Scheduler(
            SchedulerLimits(self._max_batch * self._prompt_tokens, batch, 1 << 20, 1, speculation=limits),
            KVCacheManager(self._num_blocks, _BLOCK_SIZE, is_shared=False),
            EncoderCacheManager(1),
        )
        requests = [self._request(workload, number, index) for index in range(batch)]
        for request in requests:
            scheduler.add(request)
        # All prompts, in one step.
        self._step(scheduler)
        assert all(request.num_output_tokens == 1 for request in requests)
        num_steps = 0
        started_s = time.perf_counter()
        while scheduler.live_requests():
            self._step(scheduler)
            num_steps += 1
        duration_s = time.perf_counter() - started_s
        self._runner.execute_model(scheduler.schedule())
        for request in requests:
            script = self._runner.scripts.pop(request.request_id, None)
            assert script is None or script == tuple(request.output_token_ids), "guesses changed the answer"
        return Turn(
            tokens_per_s=batch * (self._answer_tokens - 1) / duration_s,
            num_steps=num_steps,
            num_drafted=scheduler.speculation.num_drafted,
            num_accepted=scheduler.speculation.num_accepted,
        )

    def _step(self, scheduler: Scheduler) -> None:
        output = scheduler.schedule()
        scheduler.update(output, self._runner.execute_model(output))

    def _request(self, workload: str, number: int, index: int) -> Request:
        draw = random.Random(f"{workload} {number} {index}")
        prompt = tuple(draw.choices(_WORDS, k=self._prompt_tokens))
        name = RequestId(f"r{index}")
        write = WORKLOADS[workload]
        if write is not None:
            self._runner.scripts[name] = write(draw, prompt, self._answer_tokens)
        params = SamplingParams(max_tokens=self._answer_tokens)
        return Request(name, Prompt(prompt), params, arrival_s=float(index))


def section(model: str, num_guesses: int, cells: Sequence[Cell]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    head = [
        "answers",
        "batch",
        "tokens/s without",
        "with",
        "with ÷ without",
        "least … most",
        "guesses right",
        "steps saved",
    ]
    question = (
        "## speculation\n\nWhat does prompt lookup gain where answers repeat, and what does it cost where they do not? "
        f"{model},\n{num_guesses} guesses. Answers are scripted: copied from the prompt, half of them quotations, what "
        "the random weights\nsay by themselves (own), without repetitions, and of twelve words in any order."
    )
    return "\n\n".join([question, report.table(head, [_row(cell) for cell in cells])])


def _row(cell: Cell) -> list[str]:
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(cell.with_guesses, cell.without, strict=True)]
    num_drafted = sum(turn.num_drafted for turn in cell.with_guesses)
    num_accepted = sum(turn.num_accepted for turn in cell.with_guesses)
    num_steps = sum(turn.num_steps for turn in cell.with_guesses)
    saved = 1 - num_steps / sum(turn.num_steps for turn in cell.without)
    return [
        cell.workload,
        str(cell.batch),
        f"{statistics.median(turn.tokens_per_s for turn in cell.without):.0f}",
        f"{statistics.median(turn.tokens_per_s for turn in cell.with_guesses):.0f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} … {max(ratios):.2f}",
        f"{num_accepted} of {num_drafted}",
        f"{100 * saved:.0f} %",
    ]


if __name__ == "__main__":
    main()
