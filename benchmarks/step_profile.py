"""Where does the time of a decode step go on a CPU, and what is each part's physical limit? `--help` for the knobs.

The runner's methods are timed as a step calls them. What happens inside the one call of the stack is taken apart by
running its linear layers and its attention alone, on the same shapes and the same memory.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import models, report
from benchmarks.runner_steps import RunnerSteps
from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata, LayerOptions
from decoder_svc.runner.cpu import CPUModelRunner
from decoder_svc.runner.cpu_attention import NativeBackend
from decoder_svc.runner.native_stack import NativeStack
from decoder_svc.runner.packed_weights import NativeLinear

_NAME = "step_profile"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Of a step, in its order; the stack's parts are below it.
_METHODS = ("_update_states", "_prepare_inputs", "_embed", "_sample")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step."""

    name: str
    # Median of all steps, seconds.
    seconds: float
    # What the memory's speed or the processor's products allow, whichever takes longer; None where neither decides.
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
    """Of this machine."""

    bytes_per_s: float
    operations_per_s: float

    def seconds(self, num_bytes: float, num_operations: float) -> float:
        """The longer of the two."""
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
        if not isinstance(stack, NativeStack) or not isinstance(self._runner.backend, NativeBackend):
            raise SystemExit("there is no native stack here")
        self._stack, self._backend = stack, self._runner.backend
        self._limits = measured_limits(self._runner.model.dtype)

    def profile(self, dtype: str, batch: int, context: int, num_steps: int) -> Profile:
        """Medians over the steps."""
        seconds: dict[str, list[float]] = {}
        with _Timed(self._runner, seconds):
            whole = self._steps.decode(self._runner, batch, context, num_steps)
        spec = self._runner.get_kv_cache_spec()
        kv_bytes = batch * context * spec.block_bytes / spec.block_size
        text = self._runner.model.config.get_text_config()
        # Scores and weighted values of all query heads.
        kv_operations = 4.0 * batch * context * text.num_attention_heads * spec.head_dim * spec.num_layers
        head = self._runner.model.lm_head
        head_limit = self._limits.seconds(head.nbytes, 2.0 * batch * head.in_features * head.out_features)
        weight_limit = self._limits.seconds(
            self._stack.nbytes, 2.0 * batch * self._stack.nbytes / self._runner.model.dtype.itemsize
        )
        kv_limit = self._limits.seconds(kv_bytes, kv_operations)
        stack = statistics.median(seconds["stack"])
        linears = self._time(num_steps, lambda: self._run_linears(batch))
        attention = self._time(num_steps, self._attention(batch, context))
        parts = [
            Part("scheduler's words to arrays", _median(seconds, "_update_states", "_prepare_inputs"), None),
            Part("embeddings", _median(seconds, "_embed"), None),
            Part("stack", stack, weight_limit + kv_limit),
            Part("its linear layers alone", linears, weight_limit),
            Part("its attention alone", attention, kv_limit),
            Part("its norms, rotation, threads meeting: the rest", stack - linears - attention, None),
            Part("head", _median(seconds, "head"), head_limit),
            Part("choosing tokens", _median(seconds, "_sample"), None),
        ]
        step = statistics.median(whole)
        return Profile(dtype, batch, context, step, weight_limit + kv_limit + head_limit, parts)

    def _time(self, num_rounds: int, run: Callable[[], None]) -> float:
        run()
        found = []
        for _ in range(num_rounds):
            started_s = time.perf_counter()
            run()
            found.append(time.perf_counter() - started_s)
        return statistics.median(found)

    def _run_linears(self, batch: int) -> None:
        for layer in self._linears():
            layer(torch.zeros(batch, layer.in_features, dtype=self._runner.model.dtype))

    @functools.cache  # noqa: B019  # one profiler a run
    def _linears(self) -> list[NativeLinear]:
        library, num_threads = self._backend.library, self._backend.num_threads
        return [NativeLinear(library, weights, num_threads) for weights in self._stack.weights()]

    def _attention(self, batch: int, context: int) -> Callable[[], None]:
        spec, text = self._runner.get_kv_cache_spec(), self._runner.model.config.get_text_config()
        tables = [torch.tensor(self._steps.blocks(index, context)) for index in range(batch)]
        last, offset = (context - 1) // spec.block_size, (context - 1) % spec.block_size
        slots = torch.stack([table[last] * spec.block_size + offset for table in tables])
        blocks = BlockMetadata(slots, tuple(tables), (0,) * batch)
        metadata = AttentionMetadata(blocks, None, (1,) * batch, (context,) * batch, ((),) * batch, False)
        query = torch.randn(batch, text.num_attention_heads, spec.head_dim).to(spec.dtype)
        new = torch.randn(batch, spec.num_kv_heads, spec.head_dim).to(spec.dtype)
        options = LayerOptions(spec.head_dim**-0.5)

        def run() -> None:
            for layer in range(spec.num_layers):
                self._backend.forward(layer, query, new, new, metadata, options)

        return run


class _Timed:
    """Notes how long the parts of each step take, until it is left."""

    def __init__(self, runner: CPUModelRunner, seconds: dict[str, list[float]]) -> None:
        self._runner, self._seconds = runner, seconds

    def __enter__(self) -> None:
        runner = self._runner
        for name in _METHODS:
            setattr(runner, name, self._noting(name, getattr(runner, name)))
        self._restored = [(runner.model.model.language_model, "stack"), (runner.model.lm_head, "head")]
        for module, name in self._restored:
            module.forward = self._noting(name, module.forward)

    def __exit__(self, *_: object) -> None:
        for name in _METHODS:
            delattr(self._runner, name)
        for module, _name in self._restored:
            del module.forward

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = time.perf_counter()
            result = function(*arguments, **named)
            self._seconds.setdefault(name, []).append(time.perf_counter() - started_s)
            return result

        return timed


def _median(seconds: dict[str, list[float]], *names: str) -> float:
    return sum(statistics.median(seconds[name]) for name in names)


def measured_limits(dtype: torch.dtype) -> Limits:
    """How fast this machine reads memory, and multiplies large matrices by PyTorch; the best of a few."""
    source = torch.ones(128 << 20, dtype=torch.float32)
    one, other = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    return Limits(
        source.nbytes / min(_seconds(source.sum) for _ in range(7)),
        2 * 2048**3 / min(_seconds(lambda: one @ other) for _ in range(7)),
    )


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def section(profiles: list[Profile]) -> str:
    """The section of RESULTS.md."""
    question = (
        "## step_profile\n\nWhere does the time of a decode step go (small-llava), and what is the limit of each part: "
        "bytes over the memory's\nspeed, or products over the processor's, whichever takes longer? Parts that are "
        "measured alone lie in the stack."
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
