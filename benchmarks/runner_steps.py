"""Decode steps of the CPU runner alone, by our kernels and by transformers' modules, on the same weights in turns."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoder_svc.prompt.family import load_family
from decoder_svc.runner.attention import PAGED_ATTENTION, SdpaBackend
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SchedulerOutput
from lookonce.model.adapter_folder import AdapterFolder
from lookonce.model.half_model import load_text_half
from lookonce.model.model_folder import ModelFolder
from lookonce.model.pretrained_tokenizer import load_pretrained

_BLOCK_SIZE = 16
# Steps per round on transformers' modules, where one step may take seconds.
_SLOW_STEPS = 4
# Large enough that no cache of the processor holds it.
COPIED_BYTES = 512 << 20
_GREEDY = SamplingParams()


class ModulesRunner(CPUModelRunner):
    """transformers' modules, and PyTorch's attention."""

    def load_model(self) -> None:
        """Loads the model without native kernels."""
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION)
        self.backend = SdpaBackend()


def read_bandwidth(source: torch.Tensor) -> float:
    """Returns bytes per second, the best of several passes, since the first may have to obtain memory from the host."""
    seconds = []
    for _ in range(5):
        started_s = time.perf_counter()
        source.sum()
        seconds.append(time.perf_counter() - started_s)
    num_bytes: int = source.nbytes
    return num_bytes / min(seconds)


@dataclass(frozen=True, slots=True)
class StepCell:
    """One batch with one length of context."""

    dtype: str
    batch: int
    context: int
    # Bytes that a step must read: the weights once, and each sequence's keys and values.
    read_bytes: int
    # Median step of each round by runner, seconds.
    steps_s: dict[str, list[float]]
    # Memory read speed of this machine in each round, bytes per second.
    bandwidth: list[float]


class RunnerSteps:
    """Two runners of one model."""

    def __init__(
        self,
        folder: pathlib.Path,
        dtype: torch.dtype,
        max_batch: int,
        max_tokens: int,
        adapters: Sequence[AdapterFolder] = (),
        quantize_bits: int | None = None,
        rounds_kv_cache: bool = False,
    ) -> None:
        """`max_tokens` bounds a sequence's context and what is decoded.

        Our runner has the adapters, rounds weights to `quantize_bits`, and keys and values if `rounds_kv_cache`.
        """
        self._dtype = dtype
        family = load_family(ModelFolder.open(folder), load_pretrained(folder))
        config = RunnerConfig(folder, dtype, _BLOCK_SIZE, None)
        modules = ModulesRunner(config, family)
        self._weight_bytes = sum(
            parameter.nbytes
            for name, parameter in modules.model.named_parameters()
            # A step reads one row of the embedding table per token, unless the table is the head as well.
            if "embed_tokens" not in name or modules.model.config.get_text_config().tie_word_embeddings
        )
        own = dataclasses.replace(
            config, adapters=tuple(adapters) or None, quantize_bits=quantize_bits, rounds_kv_cache=rounds_kv_cache
        )
        self.ours = CPUModelRunner(own, family)
        self._runners = {"modules": modules, "ours": self.ours}
        self._blocks_each = -(-max_tokens // _BLOCK_SIZE)
        num_blocks = max_batch * self._blocks_each
        for runner in self._runners.values():
            runner.initialize_kv_cache(num_blocks)
            # An unwritten pool is one zero page, which stays in the processor cache; write it to get real memory.
            for pools in runner.backend.allocate(runner.get_kv_cache_spec(), num_blocks + 1, 1, runner.device):
                for pool in pools:
                    pool.fill_(0.5 if pool.is_floating_point() else 1)
        self._source = torch.ones(COPIED_BYTES // 4, dtype=torch.float32)

    def measure(self, batch: int, context: int, num_rounds: int, num_steps: int) -> StepCell:
        """Measures both runners in turns."""
        spec = self._runners["modules"].get_kv_cache_spec()
        kv_bytes = batch * context * spec.block_bytes // spec.block_size
        steps_s: dict[str, list[float]] = {name: [] for name in self._runners}
        bandwidth = []
        for number in range(num_rounds + 1):
            for name in sorted(self._runners, reverse=number % 2 == 1):
                few = num_steps if name == "ours" else min(num_steps, _SLOW_STEPS)
                seconds = self.decode(self._runners[name], batch, context, few)
                # The first round is for the caches.
                if number:
                    steps_s[name].append(statistics.median(seconds))
            if number:
                bandwidth.append(read_bandwidth(self._source))
        dtype = str(self._dtype).removeprefix("torch.")
        return StepCell(dtype, batch, context, self._weight_bytes + kv_bytes, steps_s, bandwidth)

    def decode(
        self,
        runner: CPUModelRunner,
        batch: int,
        context: int,
        num_steps: int,
        sampling: SamplingParams = _GREEDY,
        adapters: Sequence[str | None] = (None,),
    ) -> list[float]:
        """Returns the seconds of each step after the first. All requests sample alike, each with a seed of its own.

        Requests have these adapters in turn.
        """
        names = [RequestId(f"r{index}") for index in range(batch)]
        admitted = tuple(
            AdmittedRequest(
                name,
                (5,) * context,
                context,
                (),
                None,
                (),
                dataclasses.replace(sampling, max_tokens=num_steps + 2, seed=None if sampling.is_greedy else index),
                adapter=adapters[index % len(adapters)],
            )
            for index, name in enumerate(names)
        )
        found = []
        for step in range(num_steps + 1):
            chunks = tuple(
                ScheduledChunk(
                    name,
                    context - 1 + step,
                    1,
                    0,
                    0,
                    self.blocks(index, context + num_steps) if step == 0 else (),
                    True,
                )
                for index, name in enumerate(names)
            )
            output = SchedulerOutput(admitted if step == 0 else (), chunks, (), (), ())
            started_s = time.perf_counter()
            runner.execute_model(output)
            found.append(time.perf_counter() - started_s)
        runner.execute_model(SchedulerOutput((), (), tuple(names), (), ()))
        return found[1:]

    def blocks(self, index: int, num_tokens: int) -> tuple[int, ...]:
        """Returns the block ids of the sequence with this index."""
        first = index * self._blocks_each
        return tuple(range(first, first + -(-num_tokens // _BLOCK_SIZE)))
