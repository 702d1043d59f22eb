"""How fast are decoding and prefill, against vLLM, against transformers' own modules, and against the memory's speed?

Two measurements; `--help` lists the options. First, steps of the model runner alone: our kernels and transformers'
modules take turns on the same weights. Second, requests through the engine without services: our engine and the peer's
take turns on the same prompts. Both hold the prompts in their prefix caches except for the last block (128 tokens for
the peer). One step computes that rest for the whole batch, so all requests decode together.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks import models, peer, report
from benchmarks.engine_thread import EngineThread
from benchmarks.runner_steps import RunnerSteps, StepCell

_NAME = "decode_speed"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_BLOCK_SIZE = 16
# vLLM's block size on CPUs.
_PEERS_BLOCK_SIZE = 128
# Ids that the tokenizer of small-llava has for plain text.
_FIRST_ID, _STOP_ID = 300, 900


@dataclass(frozen=True, slots=True)
class PeerCell:
    """One batch with one length of context, through both engines."""

    dtype: str
    batch: int
    context: int
    # Median time between tokens of each round, seconds.
    ours_s: list[float]
    peers_s: list[float]


@dataclass(frozen=True, slots=True)
class PrefillCell:
    """New prompts, one at a time, through both engines."""

    dtype: str
    num_tokens: int
    # Time to the first token of each prompt, seconds.
    ours_s: list[float]
    peers_s: list[float]


@dataclass(frozen=True, slots=True)
class Plan:
    """The cells to measure and the number of rounds."""

    dtypes: list[str]
    batches: list[int]
    contexts: list[int]
    rounds: int
    # Tokens that each request decodes after its first one.
    steps: int
    is_quick: bool


def main() -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    arguments = _arguments()
    plan = Plan(
        arguments.dtypes, arguments.batches, arguments.contexts, arguments.rounds, arguments.steps, arguments.quick
    )
    install = peer.named_peer(arguments)
    step_cells = measure_steps(plan)
    peer_cells: list[PeerCell] = []
    prefills: list[PrefillCell] = []
    if install is not None:
        for dtype in plan.dtypes:
            decoded, prefilled = measure_beside_peer(plan, dtype, install)
            peer_cells += decoded
            prefills += prefilled
    figures = {
        "steps": [asdict(cell) for cell in step_cells],
        "beside_peer": [asdict(cell) for cell in peer_cells],
        "prefill": [asdict(cell) for cell in prefills],
    }
    report.publish(_NAME, figures, section(step_cells, peer_cells, prefills), is_quick=plan.is_quick)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="of a round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--dtypes", nargs="+", default=list(_DTYPES), choices=list(_DTYPES))
    peer.add_arguments(parser)
    report.add_quick(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.batches, arguments.contexts = 2, 3, [1, 3], [40]
        arguments.dtypes = ["float32"]
    return arguments


def measure_steps(plan: Plan) -> list[StepCell]:
    """Measures decode steps of the runner alone."""
    cells = []
    for dtype in plan.dtypes:
        folder = models.demo_model() if plan.is_quick else models.small_llava(_DTYPES[dtype])
        bench = RunnerSteps(folder, _DTYPES[dtype], max(plan.batches), max(plan.contexts) + plan.steps + 2)
        for context in plan.contexts:
            for batch in plan.batches:
                cells.append(bench.measure(batch, context, plan.rounds, plan.steps))
                print(_step_row(cells[-1]), flush=True)
    return cells


def measure_beside_peer(plan: Plan, dtype: str, install: peer.PeerInstall) -> tuple[list[PeerCell], list[PrefillCell]]:
    """Measures requests through both engines. A batch uses the first contexts of the largest batch."""
    rng = random.Random(dtype)
    longest = max(plan.contexts) + plan.steps + 1
    with _engines(plan, dtype, install, longest) as (ours, theirs):
        prefills = [_prefill(dtype, context, rng, plan.rounds, ours, theirs) for context in plan.contexts]
        cells = []
        for context in plan.contexts:
            prompts = [_prompt(rng, context) for _ in range(max(plan.batches))]
            for batch in plan.batches:
                cells.append(_decode(plan, dtype, prompts[:batch], ours, theirs))
                print(_peer_row(cells[-1]), flush=True)
    return cells, prefills


@contextlib.contextmanager
def _engines(
    plan: Plan, dtype: str, install: peer.PeerInstall, longest: int
) -> Iterator[tuple[EngineThread, peer.Peer]]:
    """Opens both engines with room for the largest batch."""
    folder = models.demo_model() if plan.is_quick else models.small_llava(_DTYPES[dtype])
    num_blocks = (max(plan.batches) + 2) * -(-longest // _BLOCK_SIZE)
    own = ["--num-kv-blocks", str(num_blocks), "--max-num-seqs", str(max(plan.batches)), "--dtype", dtype]
    kv_bytes = models.kv_token_bytes(folder) * num_blocks * _BLOCK_SIZE
    # One step must hold the uncached rest of all prompts; vLLM's default is 4096 tokens.
    options = {"max_num_batched_tokens": max(4096, max(plan.batches) * (_PEERS_BLOCK_SIZE + 1))}
    with (
        peer.Peer(install, folder, kv_cache_bytes=kv_bytes * 5 // 4, dtype=dtype, options=options) as theirs,
        EngineThread(["--model", str(folder), *own]) as ours,
    ):
        yield ours, theirs


def _decode(
    plan: Plan, dtype: str, prompts: Sequence[tuple[int, ...]], ours: EngineThread, theirs: peer.Peer
) -> PeerCell:
    cell = PeerCell(dtype, len(prompts), len(prompts[0]), [], [])
    num_tokens = plan.steps + 1
    requests = [peer.PeerRequest(prompt, (), num_tokens) for prompt in prompts]
    for number in range(plan.rounds + 1):
        with theirs.paused():
            own = [answer.decode_s for answer in ours.run(prompts, num_tokens)]
        other = [answer.decode_s for answer in theirs.run(requests).answers]
        # The first round fills both prefix caches.
        if number:
            cell.ours_s.append(statistics.median(own) / plan.steps)
            cell.peers_s.append(statistics.median(other) / plan.steps)
    return cell


def _prefill(
    dtype: str, num_tokens: int, rng: random.Random, num_rounds: int, ours: EngineThread, theirs: peer.Peer
) -> PrefillCell:
    cell = PrefillCell(dtype, num_tokens, [], [])
    for number in range(num_rounds + 1):
        prompt = _prompt(rng, num_tokens)
        with theirs.paused():
            (own,) = ours.run([prompt], 1)
        (other,) = theirs.run([peer.PeerRequest(prompt, (), 1)]).answers
        if number:
            cell.ours_s.append(own.first_token_s)
            cell.peers_s.append(other.first_token_s)
    return cell


def _prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST_ID, _STOP_ID) for _ in range(num_tokens))


def section(steps: Sequence[StepCell], beside: Sequence[PeerCell], prefills: Sequence[PrefillCell]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    parts = [
        "## decode_speed\n\nHow fast are decoding and prefill (small-llava: a Llama of 135M parameters)? Goals: at "
        "least as fast as vLLM at every\nbatch, 1.2 × at batch 1, and 70 % of the memory's speed there.",
        "Through the engines, the peer's (vLLM, offline) and ours in turns; time between tokens:"
        if beside
        else "The peer was not run.",
    ]
    if beside:
        head = ["dtype", "batch", "context", "vLLM", "ours", "vLLM ÷ ours", "least … most"]
        parts.append(report.table(head, [_peer_row(cell) for cell in beside]))
        parts.append("Time to the first token of a prompt that nobody has seen:")
        head = ["dtype", "tokens", "vLLM", "ours", "vLLM ÷ ours", "least … most"]
        parts.append(report.table(head, [_prefill_row(cell) for cell in prefills]))
    parts.append(
        "Steps of the runner alone. Last column: bytes that a step must read (weights once, keys and values) over what "
        "this\nmachine reads in that time."
    )
    head = [
        "dtype", "batch", "context", "transformers' modules", "ours", "modules ÷ ours", "least … most",
        "of the memory's speed",
    ]  # fmt: skip
    parts.append(report.table(head, [_step_row(cell) for cell in steps]))
    return "\n\n".join(parts)


def _peer_row(cell: PeerCell) -> list[str]:
    return [cell.dtype, str(cell.batch), str(cell.context), *_compared(cell.peers_s, cell.ours_s)]


def _prefill_row(cell: PrefillCell) -> list[str]:
    return [cell.dtype, str(cell.num_tokens), *_compared(cell.peers_s, cell.ours_s)]


def _step_row(cell: StepCell) -> list[str]:
    ours = cell.steps_s["ours"]
    share = statistics.median(
        cell.read_bytes / seconds / speed for seconds, speed in zip(ours, cell.bandwidth, strict=True)
    )
    compared = _compared(cell.steps_s["modules"], ours)
    return [cell.dtype, str(cell.batch), str(cell.context), *compared, f"{100 * share:.0f} %"]


def _compared(others: Sequence[float], ours: Sequence[float]) -> list[str]:
    ratios = [other / own for other, own in zip(others, ours, strict=True)]
    return [
        f"{1000 * statistics.median(others):.1f} ms",
        f"{1000 * statistics.median(ours):.1f} ms",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} … {max(ratios):.2f}",
    ]


if __name__ == "__main__":
    main()
