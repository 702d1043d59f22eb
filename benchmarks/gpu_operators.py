"""How many device operators does a step take on CUDA? `--help` lists the options. Needs no GPU.

A small model is launch-bound on a GPU: the number of operators decides about the time of a step without graphs, and of
sampling with them. The CUDA runner computes on a simulated device, where operators are counted. Views and allocations
launch nothing and are not counted.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import models, report
from benchmarks.gpu_steps import StepDriver
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SchedulerOutput

_NAME = "gpu_operators"
_PROMPT_TOKENS = 40
# Random parameters of one batch each; all rows of a batch have the same kind.
_SAMPLED = SamplingParams(temperature=0.8, seed=1)
KINDS = {
    "greedy": SamplingParams(),
    "temperature": _SAMPLED,
    "top-p": replace(_SAMPLED, top_p=0.9),
    "top-k, top-p, all penalties": replace(
        _SAMPLED, top_p=0.9, top_k=50, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1
    ),
}
_VOCAB = 32_000
# Larger batches take minutes in Triton's interpreter, and the number of launches does not depend on the batch.
_MAX_MIXED_BATCH = 4


@dataclass(frozen=True, slots=True)
class MixedLengths:
    """Tokens in a step with a chunk beside single tokens."""

    prompt: int
    # This many tokens are left of a prompt after an image hit.
    chunk: int


_LENGTHS = MixedLengths(_PROMPT_TOKENS, 30)


@dataclass(frozen=True, slots=True)
class StepCount:
    """Operators and copies of one decode step."""

    batch: int
    per_layer: float
    # Operators of the whole step: layers, everything around them, and greedy sampling.
    step: int
    copies_to_device: int
    synchronisations: int


@dataclass(frozen=True, slots=True)
class MixedCount:
    """Launches and copies of one greedy step with a chunk beside single tokens."""

    batch: int
    has_graphs: bool
    # Operators and replays of graphs.
    launches: int
    copies_to_device: int
    synchronisations: int


@dataclass(frozen=True, slots=True)
class SampleCount:
    """Operators of sampling one batch, when its parameters are on the device already."""

    batch: int
    kind: str
    operators: int
    copies_to_device: int


class OperatorCount(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Counts the operators that write memory of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and counts one operator of PyTorch."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not name.startswith("empty") and any(map(_is_on_device, tree_leaves(result))):
            given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            is_view = all(_address(each) in given for each in tree_leaves(result) if isinstance(each, Tensor))
            if not is_view or any(each.alias_info and each.alias_info.is_write for each in func._schema.arguments):
                self.counts[name] += 1
        return result


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _address(tensor: Tensor) -> int:
    return int(getattr(tensor, "content", tensor).untyped_storage().data_ptr())


def main(argv: Sequence[str] | None = None) -> None:
    """Counts, and writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    report.add_quick(parser)
    arguments = parser.parse_args(argv)
    prompt_tokens, lengths = _PROMPT_TOKENS, _LENGTHS
    if arguments.quick:
        arguments.batches, prompt_tokens, lengths = [2], 3, MixedLengths(8, 5)
    steps, mixed, samples = [], [], []
    with simulated_cuda() as cuda:
        for batch in arguments.batches:
            steps.append(count_step(cuda, models.demo_model(), batch, prompt_tokens))
            samples += [count_samples(cuda, batch, kind) for kind in KINDS]
        for batch in sorted({min(batch, _MAX_MIXED_BATCH) for batch in arguments.batches}):
            mixed += [count_mixed_step(cuda, models.demo_model(), batch, lengths, each) for each in (False, True)]
    figures = {
        name: [asdict(each) for each in counts]
        for name, counts in (("steps", steps), ("mixed", mixed), ("samples", samples))
    }
    report.publish(_NAME, figures, section(steps, mixed, samples), is_quick=arguments.quick)


@contextmanager
def simulated_cuda() -> Iterator[Any]:
    """Replaces CUDA by the tests' simulated device, with our kernels in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    # The folder into which `make venv` installs Triton.
    sys.path.append(str(pathlib.Path(sys.prefix) / "triton"))
    from decoder_svc.runner.cuda import triton_attention, triton_layers, triton_penalties, triton_writes
    from lookonce.model.kernels import triton_rowwise
    from tests.decoder_svc.runner.cuda.fake_cuda import installed

    with installed(triton_attention, triton_layers, triton_penalties, triton_rowwise, triton_writes) as cuda:
        yield cuda


def count_step(cuda: Any, folder: pathlib.Path, batch: int, prompt_tokens: int = _PROMPT_TOKENS) -> StepCount:
    """Counts the operators of one greedy decode step without graphs; a graph repeats the same ones."""
    from benchmarks.gpu_checks import runner_of
    from decoder_svc.runner.cuda.runner import GPUModelRunner

    runner = runner_of(folder, GPUModelRunner, torch.float16, max_num_seqs=batch)
    driver = StepDriver(runner, batch, prompt_tokens + 4, use_graphs=False)
    runner.overlaps_steps = False
    of_layers: list[int] = []
    with OperatorCount() as counter:

        def total() -> int:
            return int(counter.counts.total() + cuda.device.num_launches)

        for layer in runner.get_model().model.language_model.layers:
            layer.register_forward_pre_hook(lambda *_: of_layers.append(-total()))
            layer.register_forward_hook(lambda *_: of_layers.append(total()))
        steps: list[tuple[int, list[Any]]] = []
        execute = runner.execute_model

        def counted(step: Any) -> Any:
            before = total()
            of_layers.clear()
            with cuda.device.noting() as events:
                tokens = execute(step)
            if step.chunks:
                steps.append((total() - before, events))
                per_layer.append(sum(of_layers) / (len(of_layers) / 2))
            return tokens

        per_layer: list[float] = []
        vars(runner)["execute_model"] = counted
        driver.run(batch, prompt_tokens, 2)
    num_operators, events = steps[-1]
    # The copy of the tokens to the host is a return; the host waits for it later.
    copies, returns = (sum(event.kind == kind for event in events) for kind in ("pinned", "return"))
    num_waits = len(events) - copies - returns
    return StepCount(batch, per_layer[-1], num_operators - copies - returns, copies, num_waits)


def count_mixed_step(
    cuda: Any, folder: pathlib.Path, batch: int, lengths: MixedLengths, has_graphs: bool
) -> MixedCount:
    """Counts the launches of a step in which one request computes a chunk and all others compute a token."""
    from benchmarks.gpu_checks import runner_of
    from decoder_svc.runner.cuda.runner import GPUModelRunner
    from decoder_svc.runner.graphs.chunk_table import chunk_graph_sizes
    from tests.decoder_svc.runner.cuda.fake_cuda import FakeGraph

    runner = runner_of(folder, GPUModelRunner, torch.float16, max_num_seqs=batch)
    # Recording takes long in Triton's interpreter, so only the graphs of this step are recorded.
    runner.tokenwise_graph_batch_sizes = runner.tokenwise_graph_batch_sizes[-1:]
    runner.chunk_graph_sizes = chunk_graph_sizes(batch - 1 + lengths.chunk)[-1:]
    runner.config = replace(runner.config, use_graphs=has_graphs)
    width = -(-(lengths.prompt + 4) // runner.config.block_size)
    before, mixed = _mixed_steps(batch, lengths, width)
    runner.initialize_kv_cache(batch * width)
    runner.capture_model()
    runner.execute_model(before)
    num_before = int(cuda.device.num_launches), FakeGraph.num_replays
    with OperatorCount() as counter, cuda.device.noting() as events:
        runner.execute_model(mixed)
    num_kernels = int(cuda.device.num_launches) - num_before[0]
    num_replays = FakeGraph.num_replays - num_before[1]
    copies, returns = (sum(event.kind == kind for event in events) for kind in ("pinned", "return"))
    launches = counter.counts.total() + num_kernels + num_replays - copies - returns
    return MixedCount(batch, has_graphs, launches, copies, len(events) - copies - returns)


def _mixed_steps(batch: int, lengths: MixedLengths, width: int) -> tuple[SchedulerOutput, SchedulerOutput]:
    """Returns the step of all prompts but the end of the last one, and the step that computes this end.

    Each request has `width` blocks.
    """
    names = [RequestId(str(index)) for index in range(batch)]
    admitted = tuple(
        AdmittedRequest(name, (5,) * lengths.prompt, lengths.prompt, (), None, (), SamplingParams(max_tokens=4))
        for name in names
    )
    blocks = {name: tuple(range(index * width, (index + 1) * width)) for index, name in enumerate(names)}
    starts = dict.fromkeys(names, lengths.prompt) | {names[-1]: lengths.prompt - lengths.chunk}
    first = [
        ScheduledChunk(name, 0, length, 0, 0, blocks[name], samples=length == lengths.prompt)
        for name, length in starts.items()
    ]
    rest = {name: lengths.chunk if name == names[-1] else 1 for name in names}
    second = [
        ScheduledChunk(name, starts[name], num_tokens, starts[name], 0, (), samples=True)
        for name, num_tokens in rest.items()
    ]
    return SchedulerOutput(admitted, tuple(first), (), (), ()), SchedulerOutput((), tuple(second), (), (), ())


def count_samples(cuda: Any, batch: int, kind: str) -> SampleCount:
    """Counts the operators of sampling the second step of a batch."""
    from decoder_svc.runner.cuda.triton_penalties import penalised_logits
    from decoder_svc.runner.host_transfer import PinnedTransfer
    from decoder_svc.runner.sampling.device_penalties import DevicePenalties
    from decoder_svc.runner.sampling.sample_row import SampleRow
    from decoder_svc.runner.sampling.sampler import Sampler
    from decoder_svc.runner.sampling.sampling_state import SamplingState

    params = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    # Peaked, like a language model's: no draw falls on a token that is not sorted.
    logits = torch.randn(batch, _VOCAB, generator=generator) * 6
    ids = torch.randint(0, _VOCAB, (64,), generator=generator).numpy()
    rows = [SampleRow(params, ids, 32, SamplingState(index, 32)) for index in range(batch)]
    device = torch.device("cuda", 0)
    move = PinnedTransfer(device).move
    sampler = Sampler(move, penalties=DevicePenalties(batch, _VOCAB, device, move, penalised_logits))
    on_device = logits.to(device)
    with torch.inference_mode():
        token_ids, _ = sampler.sample(on_device, rows)
        rows = [
            replace(row, token_ids=np.append(row.token_ids, token_id))
            for row, token_id in zip(rows, token_ids, strict=True)
        ]
        num_launches = cuda.device.num_launches
        with OperatorCount() as counter, cuda.device.noting() as events:
            sampler.sample(on_device, rows)
    copies = sum(event.kind == "pinned" for event in events)
    num_operators = counter.counts.total() - copies + cuda.device.num_launches - num_launches
    return SampleCount(batch, kind, num_operators, copies)


def section(steps: Sequence[StepCount], mixed: Sequence[MixedCount], samples: Sequence[SampleCount]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    return "\n\n".join(
        [
            f"## {_NAME}\n\nHow many device operators does a step take on CUDA? Counted on a simulated device; views "
            "and allocations are not counted. Steps of single tokens:",
            report.table(
                ["batch", "operators per layer", "per step", "copies to the device", "synchronisations"],
                [[each.batch, f"{each.per_layer:g}", each.step, each.copies_to_device, each.synchronisations]
                 for each in steps],
            ),
            f"Steps in which one request computes {_LENGTHS.chunk} tokens of its prompt, and the others one token:",
            report.table(
                ["batch", "graphs", "launches", "copies to the device", "synchronisations"],
                [[each.batch, "yes" if each.has_graphs else "no", each.launches, each.copies_to_device,
                  each.synchronisations] for each in mixed],
            ),
            report.table(
                ["batch", "sampling", "operators", "per row", "copies to the device"],
                [[each.batch, each.kind, each.operators, f"{each.operators / each.batch:.2g}", each.copies_to_device]
                 for each in samples],
            ),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    main()
