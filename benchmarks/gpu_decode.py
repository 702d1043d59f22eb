"""Times decode steps, steps with a prompt chunk, and prompts on one device, for `benchmarks.gpu`."""

from __future__ import annotations

import pathlib
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_checks import MakeRunner, runner_of
from benchmarks.gpu_peers import matrix_peak, memory_bandwidth
from benchmarks.gpu_steps import SAMPLINGS, StepDriver, median_and_spread
from decoder_svc.runner.cuda.quantized_layers import DeviceLinear

_NUM_STEPS = 40
_NUM_ROUNDS = 3
_NUM_TRACED_STEPS = 8
# Rows of a trace: kernels that take the most time.
_NUM_KERNELS = 25


@dataclass(frozen=True, slots=True)
class DecodeCell:
    """Steps of single tokens of one batch with one length of context, in bfloat16."""

    model: str
    batch: int
    context: int
    # A key of SAMPLINGS.
    sampling: str
    has_graphs: bool
    # Median, tenth and ninetieth percentile of a step, seconds.
    step_s: float
    low_s: float
    high_s: float
    # Bytes that a step must read, over what the device reads in a second; seconds.
    memory_limit_s: float


@dataclass(frozen=True, slots=True)
class MixedCell:
    """Steps in which `batch` requests decode and a new one brings `chunk_tokens` tokens."""

    model: str
    batch: int
    context: int
    chunk_tokens: int
    has_graphs: bool
    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class PrefillCell:
    """Prompts that are computed in one step, without graphs."""

    model: str
    batch: int
    prompt_tokens: int
    prefill_s: float
    # Operations of the matrix products over the device's; seconds.
    matrix_limit_s: float


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """One kernel's share of a step."""

    name: str
    # Calls and microseconds in one step.
    calls: float
    device_us: float


class DecodeBench:
    """One model in bfloat16 with one KV pool."""

    def __init__(
        self,
        name: str,
        folder: pathlib.Path,
        kind: MakeRunner,
        max_batch: int,
        max_tokens: int,
        *,
        rounds_kv_cache: bool = False,
        quantize_bits: int | None = None,
    ) -> None:
        """`max_tokens`: the longest context, with its chunk. `rounds_kv_cache`: keys and values have 8 bits."""
        self._name = f"{name}, keys of 8 bits" if rounds_kv_cache else name
        self._name += f", weights of {quantize_bits} bits" if quantize_bits else ""
        rounding: dict[str, Any] = {"rounds_kv_cache": rounds_kv_cache, "quantize_bits": quantize_bits}
        runner = runner_of(folder, kind, torch.bfloat16, max_num_seqs=max_batch, **rounding)
        # One more sequence brings the chunk of a mixed step.
        self.driver = StepDriver(runner, max_batch + 1, max_tokens + _NUM_STEPS + 1)
        text = runner.get_model().config.get_text_config()
        parameters = [
            parameter
            for name, parameter in runner.get_model().named_parameters()
            # A step reads one row of the embedding table per token, unless the table is the head as well.
            if "embed_tokens" not in name or text.tie_word_embeddings
        ]
        layers = [module for module in runner.get_model().modules() if isinstance(module, DeviceLinear)]
        self._weight_bytes = sum(each.nbytes for each in parameters) + sum(each.weight_codes.nbytes for each in layers)
        self._num_weights: int = sum(parameter.numel() for parameter in parameters)
        self._num_weights += sum(layer.in_features * layer.out_features for layer in layers)
        # Only the last token of a prompt passes the head.
        self._num_head_weights: int = text.hidden_size * text.vocab_size
        self._bandwidth = memory_bandwidth(runner.device)
        self._matrix_peak = matrix_peak(runner.device)

    @property
    def limits(self) -> dict[str, float]:
        """The device's bytes and bfloat16 operations per second."""
        return {"bytes_per_s": self._bandwidth, "operations_per_s": self._matrix_peak}

    @property
    def has_graphs(self) -> bool:
        """Whether steps are replayed from graphs."""
        return self.driver.runner.graphs is not None

    def decode(self, batch: int, context: int, sampling: str, num_steps: int = _NUM_STEPS) -> DecodeCell:
        """Decodes behind `context` cached tokens. The first round warms the caches and is not counted."""
        self.driver.fill_pools()
        rounds = [
            self.driver.run(batch, context + 1, num_steps, num_cached=context, params=SAMPLINGS[sampling]).decode_s
            for _ in range(_NUM_ROUNDS + 1)
        ][1:]
        spec = self.driver.runner.get_kv_cache_spec()
        read_bytes = self._weight_bytes + batch * context * spec.block_bytes // spec.block_size
        return DecodeCell(
            self._name,
            batch,
            context,
            sampling,
            self.has_graphs,
            *median_and_spread([second for seconds in rounds for second in seconds]),
            memory_limit_s=read_bytes / self._bandwidth,
        )

    def mixed(self, batch: int, context: int, chunk_tokens: int, num_steps: int = _NUM_STEPS) -> MixedCell:
        """Decodes while one new request after the other brings `chunk_tokens` tokens behind its cached ones."""
        self.driver.fill_pools()
        rounds = [self.driver.mixed_s(batch, context, chunk_tokens, num_steps) for _ in range(_NUM_ROUNDS + 1)][1:]
        times = median_and_spread([second for seconds in rounds for second in seconds])
        return MixedCell(self._name, batch, context, chunk_tokens, self.has_graphs, *times)

    def prefill(self, batch: int, prompt_tokens: int) -> PrefillCell:
        """Computes whole prompts in one step."""
        rounds = [self.driver.run(batch, prompt_tokens, 0).prefill_s for _ in range(_NUM_ROUNDS + 1)][1:]
        weights = (self._num_weights - self._num_head_weights) * prompt_tokens + self._num_head_weights
        return PrefillCell(
            self._name, batch, prompt_tokens, statistics.median(rounds), 2 * batch * weights / self._matrix_peak
        )

    def whole_s(self, batch: int, prompt_tokens: int, num_tokens: int) -> float:
        """Seconds from `batch` prompts to the last of `num_tokens` tokens of each."""
        runs = [self.driver.run(batch, prompt_tokens, num_tokens - 1) for _ in range(_NUM_ROUNDS + 1)][1:]
        return statistics.median(run.prefill_s + sum(run.decode_s) for run in runs)

    def trace(self, batch: int, context: int, sampling: str, chunk_tokens: int = 0) -> list[TracedKernel]:
        """Returns the kernels of a step with the most time. With `chunk_tokens`, of mixed steps."""

        def steps() -> None:
            if chunk_tokens:
                self.driver.mixed_s(batch, context, chunk_tokens, _NUM_TRACED_STEPS)
            else:
                params = SAMPLINGS[sampling]
                self.driver.run(batch, context + 1, _NUM_TRACED_STEPS, num_cached=context, params=params)

        steps()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            steps()
        events: list[Any] = [each for each in profile.key_averages() if each.device_time_total > 0]
        events.sort(key=lambda each: each.self_device_time_total, reverse=True)
        # The first step, which starts the batch, is traced as well.
        num_steps = _NUM_TRACED_STEPS + 1
        return [
            TracedKernel(each.key[:100], each.count / num_steps, each.self_device_time_total / num_steps)
            for each in events[:_NUM_KERNELS]
        ]
