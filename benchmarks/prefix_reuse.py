"""How much does the prefix cache gain with repeated prompts, and cost without them? `--help` lists the options.

Two stacks of real services, one with the prefix cache and one without, answer in turns through the SDK. The peer's
engine, with its own prefix cache, answers the same requests in its own process. Every round has new pictures and
questions. All requests of a round are sent at once.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks import report
from benchmarks.burst import Burst, run_burst
from benchmarks.models import demo_model, kv_token_bytes, small_llava
from benchmarks.peer import Peer, PeerInstall, PeerPrompts, PeerRun, add_arguments, all_paused, named_peer
from benchmarks.workloads import WORKLOADS, Ask, Workload, u40
from lookonce.local.local_stack import LocalStack

_NAME = "prefix_reuse"
_MAX_TOKENS = 16
# All requests of a round fit, and both stacks go through the same memory again and again. In a larger pool new blocks
# are cold memory with the cache and warm without (docs/log.md).
_NUM_KV_BLOCKS = 2200
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Round:
    """One workload on one stack."""

    num_requests: int
    # From the first request to the last answer, seconds.
    duration_s: float
    # User and system CPU time of the decoder during the round, seconds.
    decoder_cpu_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_encodes: int


@dataclass(frozen=True, slots=True)
class PeerRound:
    """The same requests on the peer, with its prefix cache."""

    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    # Requests whose answer was ours, token for token. In bfloat16 near ties fall either way.
    num_same_answers: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests with and without the prefix cache, and on the peer where there is one."""

    on: Round
    off: Round
    peer: PeerRound | None

    @property
    def speed_ratio(self) -> float:
        """Ratio of requests per second with the cache to those without."""
        return self.off.duration_s / self.on.duration_s

    @property
    def cpu_ratio(self) -> float:
        """Ratio of the decoder's CPU time with the cache to that without."""
        return self.on.decoder_cpu_s / self.off.decoder_cpu_s

    @property
    def peer_ratio(self) -> float | None:
        """Ratio of requests per second with the cache to those of the peer."""
        return None if self.peer is None else self.peer.duration_s / self.on.duration_s


def main(given: Sequence[str] | None = None) -> None:
    """Measures every workload, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per workload and stack (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[one.name for one in WORKLOADS], help="names of workloads")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add_arguments(parser)
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    workloads = [one for one in WORKLOADS if one.name in arguments.only]
    if arguments.quick:
        model, arguments.rounds = demo_model(), 1
        workloads = [replace(one, num_requests=10) for one in workloads]
    else:
        model = small_llava(getattr(torch, arguments.dtype))
    install = named_peer(arguments)
    pairs = measure(model, workloads, arguments.rounds, install)
    figures = {
        "model": model.name,
        "peer": "not run" if install is None else "vLLM",
        "workloads": {one.name: [asdict(pair) for pair in pairs[one.name]] for one in workloads},
    }
    report.publish(_NAME, figures, _section(model.name, workloads, pairs), is_quick=arguments.quick)


def measure(
    model: pathlib.Path, workloads: Sequence[Workload], num_rounds: int, install: PeerInstall | None
) -> dict[str, list[Pair]]:
    """Runs interleaved rounds; the sides take turns to begin."""
    pairs: dict[str, list[Pair]] = {one.name: [] for one in workloads}
    prompts = PeerPrompts(model)
    with contextlib.ExitStack() as stacks:
        peer = None
        if install is not None:
            kv_cache_bytes = _NUM_KV_BLOCKS * _BLOCK_SIZE * kv_token_bytes(model)
            peer = stacks.enter_context(Peer(install, model, kv_cache_bytes=kv_cache_bytes))
        pool = ["--num-kv-blocks", str(_NUM_KV_BLOCKS), "--block-size", str(_BLOCK_SIZE)]
        on = stacks.enter_context(LocalStack(model, decoder_arguments=["--prefix-cache", *pool]))
        off = stacks.enter_context(LocalStack(model, decoder_arguments=["--no-prefix-cache", *pool]))
        warm_up = u40(random.Random("warm-up"))[:4]
        # The numbers of requests matter, too: the peer's kernels are made ready for each.
        for asks in [
            warm_up,
            *(workload.draw(random.Random("warm-up"), workload.num_requests) for workload in workloads),
        ]:
            _measure_all(on, off, peer, prompts, asks, turn=0)
        for number in range(num_rounds):
            for workload in workloads:
                asks = workload.draw(random.Random(f"{workload.name}:{number}"), workload.num_requests)
                pair = _measure_all(on, off, peer, prompts, asks, turn=number)
                pairs[workload.name].append(pair)
                ratios = f"with ÷ without {pair.speed_ratio:.3f}, CPU {pair.cpu_ratio:.3f}, ÷ peer {pair.peer_ratio}"
                print(f"{workload.name} {number}: {ratios}, {pair}", flush=True)
    return pairs


def _measure_all(
    on: LocalStack, off: LocalStack, peer: Peer | None, prompts: PeerPrompts, asks: Sequence[Ask], turn: int
) -> Pair:
    """The same requests on all sides, one after the other; `turn` decides who begins."""
    with_cache: list[Burst] = []
    without: list[Burst] = []
    of_peer: list[PeerRun] = []

    def ours_alone(stack: LocalStack) -> Burst:
        with all_paused([peer] if peer is not None else []):
            return run_burst(stack, asks, _MAX_TOKENS)

    sides: list[Callable[[], None]] = [
        lambda: with_cache.append(ours_alone(on)),
        lambda: without.append(ours_alone(off)),
    ]
    if peer is not None:
        requests = [prompts.request(ask.question, ask.pictures, _MAX_TOKENS) for ask in asks]
        sides.append(lambda: of_peer.append(peer.run(requests)))
    for index in range(len(sides)):
        sides[(index + turn) % len(sides)]()
    ours = with_cache[0]
    return Pair(_round(ours), _round(without[0]), _peer_round(of_peer[0], ours) if of_peer else None)


def _round(burst: Burst) -> Round:
    return Round(
        len(burst.answers),
        burst.duration_s,
        burst.decoder_cpu_s,
        burst.num_prompt_tokens,
        burst.num_cached_tokens,
        burst.num_encodes,
    )


def _peer_round(run: PeerRun, ours: Burst) -> PeerRound:
    num_prompt_tokens = sum(one.num_prompt_tokens for one in run.answers)
    if num_prompt_tokens != ours.num_prompt_tokens:
        raise AssertionError(f"the peer had {num_prompt_tokens} prompt tokens, we {ours.num_prompt_tokens}")
    return PeerRound(
        run.duration_s,
        num_prompt_tokens,
        sum(one.num_cached_tokens for one in run.answers),
        sum(one.token_ids == own.token_ids for one, own in zip(run.answers, ours.answers, strict=True)),
    )


def _section(model: str, workloads: Sequence[Workload], pairs: dict[str, list[Pair]]) -> str:
    head = [
        "workload", "requests/s with", "without", "with ÷ without", "least … most", "decoder CPU, with ÷ without",
        "least … most", "prompt tokens cached", "encodes",
    ]  # fmt: skip
    rows = [[one.name, *_cells(pairs[one.name])] for one in workloads]
    lines = [f"* {one.name}: {one.description}." for one in workloads]
    question = (
        "## prefix_reuse\n\nWhat does the prefix cache gain where prompts repeat, and what does it cost where none "
        "does?\nGoals: at most 1 % where nothing repeats; 1.2 × the peer's requests per second for P40 and S50, 1.0 × "
        "for U40."
    )
    rounds = len(next(iter(pairs.values())))
    note = (
        f"Model `{model}`, {_MAX_TOKENS} tokens out, all requests of a round at once, a pool "
        f"of {_NUM_KV_BLOCKS} blocks of {_BLOCK_SIZE} tokens;\n{rounds} interleaved rounds, medians.\n"
        "Encodes: images that went through the encoder in a round, with the cache."
    )
    return "\n\n".join([question, "\n".join(lines), report.table(head, rows), note, _peer_part(workloads, pairs)])


def _cells(pairs: Sequence[Pair]) -> list[str]:
    speeds, cpus = [pair.speed_ratio for pair in pairs], [pair.cpu_ratio for pair in pairs]
    cached = statistics.median(pair.on.num_cached_tokens / pair.on.num_prompt_tokens for pair in pairs)
    return [
        f"{statistics.median(pair.on.num_requests / pair.on.duration_s for pair in pairs):.2f}",
        f"{statistics.median(pair.off.num_requests / pair.off.duration_s for pair in pairs):.2f}",
        f"{statistics.median(speeds):.3f}",
        f"{min(speeds):.3f} … {max(speeds):.3f}",
        f"{statistics.median(cpus):.3f}",
        f"{min(cpus):.3f} … {max(cpus):.3f}",
        f"{cached:.0%}",
        f"{statistics.median(pair.on.num_encodes for pair in pairs):g}",
    ]


def _peer_part(workloads: Sequence[Workload], pairs: dict[str, list[Pair]]) -> str:
    """The table against the peer, or the word that it was not run."""
    rows = []
    for workload in workloads:
        beside = [(pair.on, pair.peer) for pair in pairs[workload.name] if pair.peer is not None]
        if not beside:
            return "Peer: not run."
        ratios = [peer.duration_s / ours.duration_s for ours, peer in beside]
        rows.append(
            [
                workload.name,
                f"{statistics.median(ours.num_requests / ours.duration_s for ours, _ in beside):.2f}",
                f"{statistics.median(ours.num_requests / peer.duration_s for ours, peer in beside):.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} … {max(ratios):.2f}",
                f"{workload.goal:g}",
                f"{statistics.median(peer.num_cached_tokens / peer.num_prompt_tokens for _, peer in beside):.0%}",
                f"{sum(peer.num_same_answers for _, peer in beside)} of {sum(ours.num_requests for ours, _ in beside)}",
            ]
        )
    head = [
        "workload", "requests/s", "peer", "÷ peer", "least … most", "goal", "peer's prompt tokens cached",
        "same answers",
    ]  # fmt: skip
    note = (
        "Peer: vLLM's engine with its prefix cache in a process of its own, without HTTP, in the same rounds, with as "
        "much memory\nfor keys and values. Same answers: token for token; in bfloat16 near ties fall either way."
    )
    return f"{report.table(head, rows)}\n\n{note}"


if __name__ == "__main__":
    main()
