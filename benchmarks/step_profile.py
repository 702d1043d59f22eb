"""Where does the time of a decode step go on a CPU, and what is each part's physical limit? `--help` lists the options.

The runner's methods are timed as a step calls them; inside the one call of the stack our kernels read the clock
themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import models, report
from benchmarks.runner_steps import COPIED_BYTES, RunnerSteps, read_bandwidth
from decoder_svc.runner.cpu.native_stack import NativeStack
from decoder_svc.runner.cpu.native_structures import PHASES
from decoder_svc.runner.cpu.runner import CPUModelRunner

_NAME = "step_profile"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Timed methods of a step; the phases of the stack are listed below.
_METHODS = ("_update_states", "_flattened", "prepare_inputs")
# By phase of the stack, in the order of a layer.
_PHASES = {
    "embeddings": "embeddings",
    "norms": "norms",
    "query_key_value": "queries, keys and values",
    "rotation": "rotation, writing keys and values",
    "attention": "attention",
    "attended": "output projection",
    "gate_up": "MLP: gate and up, activation",
    "down": "MLP: down",
    "head": "head",
}
# The linear layers among them, as NativeStack.weights gives them.
_LINEARS = ("query_key_value", "attended", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step."""

    name: str
    # Median of all steps, seconds.
    seconds: float
    # The longer of the limits set by memory speed and matrix products; None where neither applies.
    limit_s: float | None


@dataclass(frozen=True, slots=True)
class Profile:
    """One batch with one length of context."""

    dtype: str
    batch: int
    context: int
    step_s: float
    # The whole step's limit.
    limit_s: float
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory and matrix speed of this machine."""

    bytes_per_s: float
    operations_per_s: float

    def or_better(self, other: Limits) -> Limits:
        """The higher of each: what another machine on the same host took was there a moment later."""
        return Limits(max(self.bytes_per_s, other.bytes_per_s), max(self.operations_per_s, other.operations_per_s))

    def seconds(self, num_bytes: float, num_operations: float) -> float:
        """Returns the longer of the two limits, in seconds."""
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s)


def main() -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="per cell (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=list(_DTYPES))
    report.add_quick(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.batches, arguments.contexts, arguments.dtypes = 3, [2], [20], ["float32"]
    profiles = []
    for dtype in arguments.dtypes:
        folder = models.demo_model() if arguments.quick else models.small_llava(_DTYPES[dtype])
        num_tokens = max(arguments.contexts) + arguments.steps + 2
        profiler = StepProfiler(RunnerSteps(folder, _DTYPES[dtype], max(arguments.batches), num_tokens))
        for context in arguments.contexts:
            for batch in arguments.batches:
                profiles.append(profiler.profile(dtype, batch, context, arguments.steps))
                print(_table(profiles[-1]), flush=True)
    figures = {"profiles": [asdict(profile) for profile in profiles]}
    report.publish(_NAME, figures, section(profiles), is_quick=arguments.quick)


class StepProfiler:
    """One model on our kernels."""

    def __init__(self, steps: RunnerSteps) -> None:
        """Raises SystemExit where there is no stack: then there is nothing to take apart."""
        self._steps = steps
        self._runner = steps.ours
        stack = self._runner.model.model.language_model
        if not isinstance(stack, NativeStack):
            raise SystemExit("there is no native stack here")
        self._stack = stack

    def profile(self, dtype: str, batch: int, context: int, num_steps: int) -> Profile:
        """Returns the median of each part over the steps."""
        limits = measured_limits(self._runner.model.dtype)
        seconds: dict[str, list[float]] = {}
        with _Timed(self._runner, self._stack, seconds):
            whole = self._steps.decode(self._runner, batch, context, num_steps)
        limits = limits.or_better(measured_limits(self._runner.model.dtype))
        # The first step is not among the whole ones, and the last one, which gives requests back, computes nothing.
        steps = [dict(zip(seconds, step, strict=True)) for step in zip(*seconds.values(), strict=False)][1:]
        outside = [name for name in seconds if name not in PHASES]
        phase_limits = self._phase_limits(limits, batch, context)

        def part(title: str, *names: str, limit_s: float | None = None) -> Part:
            return Part(title, statistics.median(sum(step[name] for name in names) for step in steps), limit_s)

        stack = [step["stack"] - sum(step[name] for name in PHASES) for step in steps]
        rest = [all_of_it - sum(step[name] for name in outside) for all_of_it, step in zip(whole, steps, strict=True)]
        parts = [
            part("the scheduler's words to arrays", *_METHODS),
            *(part(title, name, limit_s=phase_limits.get(name)) for name, title in _PHASES.items()),
            Part("the stack's call: its structures, waking threads", statistics.median(stack), None),
            part("choosing tokens", "sampler"),
            Part("between them", statistics.median(rest), None),
        ]
        limit_s = sum(phase_limits.values())
        return Profile(dtype, batch, context, statistics.median(whole), limit_s, parts)

    def _phase_limits(self, limits: Limits, batch: int, context: int) -> dict[str, float]:
        spec, text = self._runner.get_kv_cache_spec(), self._runner.model.config.get_text_config()
        found = dict.fromkeys(_LINEARS, 0.0)
        for index, weights in enumerate(self._stack.weights()):
            num_operations = 2.0 * batch * weights.num_inputs * weights.num_outputs
            found[_LINEARS[index % len(_LINEARS)]] += limits.seconds(weights.nbytes, num_operations)
        head = self._runner.model.lm_head
        found["head"] = limits.seconds(head.nbytes, 2.0 * batch * head.in_features * head.out_features)
        # Scores and weighted values of all query heads.
        num_operations = 4.0 * batch * context * text.num_attention_heads * spec.head_dim * spec.num_layers
        found["attention"] = limits.seconds(batch * context * spec.block_bytes / spec.block_size, num_operations)
        return found


class _Timed:
    """Notes how long the parts of each step take, until it is left."""

    def __init__(self, runner: CPUModelRunner, stack: NativeStack, seconds: dict[str, list[float]]) -> None:
        self._runner, self._stack, self._seconds = runner, stack, seconds
        self._sampler = runner.sampler

    def __enter__(self) -> None:
        runner = self._runner
        for name in _METHODS:
            setattr(runner, name, self._noting(name, getattr(runner, name)))
        timed: Any = SimpleNamespace(launch=self._noting("sampler", self._sampler.launch))
        runner.sampler = timed
        stack: Any = self._stack
        stack.logits = self._noting_phases(self._noting("stack", stack.logits))

    def __exit__(self, *_: object) -> None:
        for name in _METHODS:
            delattr(self._runner, name)
        self._runner.sampler = self._sampler
        del self._stack.logits
        self._stack.phase_ns = None

    def _noting_phases(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            phase_ns = self._stack.phase_ns = torch.zeros(len(PHASES), dtype=torch.int64)
            result = function(*arguments, **named)
            for name, nanoseconds in zip(PHASES, phase_ns.tolist(), strict=True):
                self._seconds.setdefault(name, []).append(nanoseconds / 1e9)
            return result

        return timed

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = time.perf_counter()
            result = function(*arguments, **named)
            self._seconds.setdefault(name, []).append(time.perf_counter() - started_s)
            return result

        return timed


def measured_limits(dtype: torch.dtype) -> Limits:
    """Measures memory read speed and PyTorch's matrix product speed; the best of several runs."""
    one, other = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    return Limits(
        read_bandwidth(torch.ones(COPIED_BYTES // 4)),
        2 * 2048**3 / min(_seconds(lambda: one @ other) for _ in range(7)),
    )


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def section(profiles: list[Profile]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    question = (
        "## step_profile\n\nWhere does the time of a decode step go (small-llava), and what is the limit of each part: "
        "bytes over the memory's\nspeed, or products over the processor's, whichever takes longer? Medians of the "
        "steps; waiting for the last thread\nis part of each part. What the processor's caches keep from one step to "
        "the next is read faster than memory."
    )
    return "\n\n".join([question, *(_table(profile) for profile in profiles)])


def _table(profile: Profile) -> str:
    head = [f"{profile.dtype}, batch {profile.batch}, context {profile.context}", "ms", "of the step", "limit, ms"]
    rows = [_row(part.name, part.seconds, part.limit_s, profile.step_s) for part in profile.parts]
    return report.table(head, [*rows, _row("**whole step**", profile.step_s, profile.limit_s, profile.step_s)])


def _row(name: str, seconds: float, limit_s: float | None, step_s: float) -> list[str]:
    limit = "" if limit_s is None else f"{1000 * limit_s:.2f}"
    return [name, f"{1000 * seconds:.2f}", f"{seconds / step_s:.0%}", limit]


if __name__ == "__main__":
    main()
