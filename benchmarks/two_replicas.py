"""Two decoders and one encoder against two engines of the peer: requests per second on the same CPUs. See `--help`.

All requests of a round are sent at once. They go to the peer's engines in turns, as a load balancer sends them, and to
our decoders in both ways: in turns, and as the SDK places them, by the pictures that they begin with. Each of the
peer's engines has a share of the CPUs to itself and encodes for itself; our three processes share them all, and rows
through Redis.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks import report
from benchmarks.burst import Burst, run_burst
from benchmarks.models import demo_model, kv_token_bytes, small_llava
from benchmarks.peer import (
    Peer,
    PeerInstall,
    PeerPrompts,
    PeerRun,
    add_arguments,
    all_paused,
    memory_bytes,
    named_peer,
)
from benchmarks.workloads import WORKLOADS, Ask, Workload
from lookonce.local.local_stack import LocalStack

_NAME = "two_replicas"
_NUM_REPLICAS = 2
_MAX_TOKENS = 16
_BLOCK_SIZE = 16
# KV blocks of each replica: half of the requests of a round fit.
_NUM_KV_BLOCKS = 1100
_GOAL = 1.5


@dataclass(frozen=True, slots=True)
class Side:
    """One workload on one side."""

    num_requests: int
    # From the first request to the last answer, seconds.
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """The same requests on both sides, and for the placed ones others of the same shape."""

    ours: Side
    # Images that went through our encoder.
    num_encodes: int
    placed: Side
    num_placed_encodes: int
    # None: not run.
    peer: Side | None


@dataclass(slots=True)
class Memory:
    """Memory of all processes after the last round, shared pages counted once; bytes."""

    ours: int = 0
    peer: int | None = None


def main(given: Sequence[str] | None = None) -> None:
    """Measures every workload, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per workload (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=["P40", "S50"], help="names of workloads")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add_arguments(parser)
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    workloads = [one for one in WORKLOADS if one.name in arguments.only]
    model = demo_model() if arguments.quick else small_llava(getattr(torch, arguments.dtype))
    if arguments.quick:
        arguments.rounds = 1
        workloads = [replace(one, num_requests=10) for one in workloads]
    install = named_peer(arguments)
    rounds, memory = measure(model, workloads, arguments.rounds, install)
    figures = {
        "model": model.name,
        "peer": "not run" if install is None else "vLLM",
        "memory_bytes": asdict(memory),
        "workloads": {name: [asdict(one) for one in found] for name, found in rounds.items()},
    }
    report.publish(_NAME, figures, _section(model.name, workloads, rounds, memory), is_quick=arguments.quick)


def measure(
    model: pathlib.Path, workloads: Sequence[Workload], num_rounds: int, install: PeerInstall | None
) -> tuple[dict[str, list[Round]], Memory]:
    """Runs interleaved rounds; the sides take turns to begin."""
    rounds: dict[str, list[Round]] = {one.name: [] for one in workloads}
    prompts, memory = PeerPrompts(model), Memory()
    with contextlib.ExitStack() as exits:
        peers = [] if install is None else _open_peers(exits, install, model)
        stack = exits.enter_context(_our_stack(model))
        for number in range(-1, num_rounds):
            for workload in workloads:
                asks, others = (
                    workload.draw(random.Random(f"{workload.name}:{number}{name}"), workload.num_requests)
                    for name in ("", ":placed")
                )
                found = _round(stack, peers, prompts, asks, others, is_odd=number % 2 == 1)
                # The first round is for the caches, and for what is compiled at first use.
                if number >= 0:
                    rounds[workload.name].append(found)
                    print(f"{workload.name} {number}: {found}", flush=True)
        assert stack.redis is not None
        memory.ours = memory_bytes([stack.redis.pid, *(one.pid for one in [*stack.encoders, *stack.decoders])])
        memory.peer = sum(peer.memory_bytes() for peer in peers) if peers else None
    return rounds, memory


def _our_stack(model: pathlib.Path) -> LocalStack:
    """Two decoders and one encoder, each with as many threads as a replica of the peer has CPUs."""
    threads = ["--num-threads", str(max(1, len(os.sched_getaffinity(0)) // _NUM_REPLICAS))]
    pool = ["--num-kv-blocks", str(_NUM_KV_BLOCKS), "--block-size", str(_BLOCK_SIZE)]
    return LocalStack(model, num_decoders=_NUM_REPLICAS, encoder_arguments=threads, decoder_arguments=[*threads, *pool])


def _open_peers(exits: contextlib.ExitStack, install: PeerInstall, model: pathlib.Path) -> list[Peer]:
    """Engines that start beside each other, each on CPUs of its own where there are enough."""
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // _NUM_REPLICAS)
    kv_cache_bytes = _NUM_KV_BLOCKS * _BLOCK_SIZE * kv_token_bytes(model)
    peers = []
    for index in range(_NUM_REPLICAS):
        own = [cpus[(index * share + each) % len(cpus)] for each in range(share)]
        peer = Peer(install, model, kv_cache_bytes=kv_cache_bytes, cpus=own)
        exits.callback(peer.close)
        peer.start()
        peers.append(peer)
    for peer in peers:
        peer.wait_until_ready()
    return peers


def _round(
    stack: LocalStack,
    peers: Sequence[Peer],
    prompts: PeerPrompts,
    asks: Sequence[Ask],
    others: Sequence[Ask],
    *,
    is_odd: bool,
) -> Round:
    theirs = _ask_peers(peers, prompts, asks) if peers and is_odd else None
    with all_paused(peers):
        placed = run_burst(stack, others, _MAX_TOKENS, routed=True) if is_odd else None
        burst = run_burst(stack, asks, _MAX_TOKENS)
        placed = placed or run_burst(stack, others, _MAX_TOKENS, routed=True)
    if peers and not is_odd:
        theirs = _ask_peers(peers, prompts, asks)
    if theirs is not None and theirs.num_prompt_tokens != burst.num_prompt_tokens:
        raise AssertionError(f"the peer had {theirs.num_prompt_tokens} prompt tokens, we {burst.num_prompt_tokens}")
    return Round(_our_side(burst), burst.num_encodes, _our_side(placed), placed.num_encodes, theirs)


def _our_side(burst: Burst) -> Side:
    return Side(len(burst.answers), burst.duration_s, burst.num_prompt_tokens, burst.num_cached_tokens)


def _ask_peers(peers: Sequence[Peer], prompts: PeerPrompts, asks: Sequence[Ask]) -> Side:
    shares: list[list[Ask]] = [list(asks[index :: len(peers)]) for index in range(len(peers))]
    requests = [[prompts.request(ask.question, ask.pictures, _MAX_TOKENS) for ask in share] for share in shares]
    started_s = time.monotonic()
    for peer, share in zip(peers, requests, strict=True):
        peer.begin(share)
    runs: list[PeerRun] = [peer.finish() for peer in peers]
    duration_s = time.monotonic() - started_s
    answers = [answer for run in runs for answer in run.answers]
    return Side(
        len(answers),
        duration_s,
        sum(answer.num_prompt_tokens for answer in answers),
        sum(answer.num_cached_tokens for answer in answers),
    )


def _section(model: str, workloads: Sequence[Workload], rounds: dict[str, list[Round]], memory: Memory) -> str:
    head = [
        "workload", "requests go", "requests/s", "÷ in turns", "encodes", "prompt tokens cached", "peer's requests/s",
        "cached", "÷ peer", "least … most",
    ]  # fmt: skip
    rows = [row for workload in workloads for row in _rows(workload.name, rounds[workload.name])]
    question = (
        "## two_replicas\n\nTwo decoders and one encoder against two engines of the peer. Requests go to the peer's "
        "engines in turns,\nand to ours in turns or as the SDK places them. "
        f"Goal: {_GOAL:g} × the peer's requests per second, with no more memory."
    )
    theirs = "not run" if memory.peer is None else f"{memory.peer / 1e9:.2f} GB"
    note = (
        f"Model `{model}`, {_MAX_TOKENS} tokens out, {len(next(iter(rounds.values())))} interleaved rounds, medians; a "
        f"pool of {_NUM_KV_BLOCKS} blocks of {_BLOCK_SIZE} tokens\nfor each replica, as many bytes for the peer's. "
        f"Memory of all processes: {memory.ours / 1e9:.2f} GB; peer: {theirs}.\n"
        "Each of the peer's engines has its own half of the CPUs; our three processes and Redis share them."
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{note}"


def _rows(name: str, rounds: Sequence[Round]) -> list[list[str]]:
    peers = [one.peer for one in rounds if one.peer is not None]
    rows = []
    for way, sides, encodes in (
        ("in turns", [one.ours for one in rounds], [one.num_encodes for one in rounds]),
        ("as placed", [one.placed for one in rounds], [one.num_placed_encodes for one in rounds]),
    ):
        to_turns = statistics.median(_speed(side) / _speed(one.ours) for side, one in zip(sides, rounds, strict=True))
        row = [
            name,
            way,
            f"{statistics.median(map(_speed, sides)):.2f}",
            f"{to_turns:.2f}",
            f"{statistics.median(encodes):g}",
            f"{statistics.median(map(_cached, sides)):.0%}",
        ]
        if peers:
            ratios = [_speed(side) / _speed(peer) for side, peer in zip(sides, peers, strict=True)]
            row += [
                f"{statistics.median(map(_speed, peers)):.2f}",
                f"{statistics.median(map(_cached, peers)):.0%}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} … {max(ratios):.2f}",
            ]
        else:
            row += ["not run", "–", "–", "–"]
        rows.append(row)
    return rows


def _speed(side: Side) -> float:
    return side.num_requests / side.duration_s


def _cached(side: Side) -> float:
    return side.num_cached_tokens / side.num_prompt_tokens


if __name__ == "__main__":
    main()
