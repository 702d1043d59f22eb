"""How long from the start of the processes to the first token, and with how much memory? `--help` lists the options.

A whole stack (Redis, encoder, decoder) is started, asked about a picture, and stopped, again and again; likewise a
decoder alone, asked for text, and the peer's engine. After the last start as many requests as the KV pool holds are
answered, so that all of it is in use, and memory is taken.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks import report
from benchmarks.burst import run_burst
from benchmarks.models import demo_model, kv_token_bytes, small_llava
from benchmarks.peer import Peer, PeerInstall, PeerPrompts, add_arguments, memory_bytes, named_peer
from benchmarks.workloads import Ask, ask_about, u40
from lookonce.client import Client
from lookonce.local.local_stack import LocalStack

_NAME = "startup"
_TIMEOUT_S = 600.0
_GOAL_S = 10.0
_MEMORY_GOAL = 0.5
_BLOCK_SIZE = 16
_NUM_KV_BLOCKS = 1700
# They fill the pool: prompts of about 650 tokens, and of fewer with the demo's model.
_NUM_REQUESTS = 40


@dataclass(frozen=True, slots=True)
class Start:
    """One start. Seconds since the first process was begun."""

    ready_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """All starts of one arrangement."""

    starts: tuple[Start, ...]
    # Memory of all its processes after the last start's requests; shared pages count once. None: not measured.
    memory_bytes: int | None


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each side (default: %(default)s)")
    add_arguments(parser)
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    model = demo_model() if arguments.quick else small_llava()
    if arguments.quick:
        arguments.rounds = 1
    install = named_peer(arguments)
    # The first starts of a run read the files from the disk.
    num_left_out = 0 if arguments.quick else 1
    load = u40(random.Random(_NAME), 4 if arguments.quick else _NUM_REQUESTS)
    sides = measure(model, arguments.rounds, install, load, num_left_out=num_left_out)
    figures = {
        "model": model.name,
        "kv_cache_bytes": _NUM_KV_BLOCKS * _BLOCK_SIZE * kv_token_bytes(model),
        "peer": "not run" if install is None else "vLLM",
        "sides": {name: asdict(side) for name, side in sides.items()},
    }
    report.publish(_NAME, figures, _section(model, sides), is_quick=arguments.quick)


def measure(
    model: pathlib.Path, num_rounds: int, install: PeerInstall | None, load: Sequence[Ask], *, num_left_out: int
) -> dict[str, Side]:
    """Interleaved starts, after `num_left_out` of ours; the last ones answer `load`."""
    starts: dict[str, list[Start]] = {"stack": [], "decoder": [], "peer": []}
    memory: dict[str, int] = {}
    for number in range(-num_left_out, num_rounds):
        ask = u40(random.Random(f"{_NAME}:{number}"), 1)[0]
        load_now = load if number == num_rounds - 1 else ()
        text = ask_about(random.Random(f"text:{number}"))
        found = {"stack": _start_stack(model, ask, load_now), "decoder": _start_stack(model, text, [], num_encoders=0)}
        if install is not None and number >= 0:
            found["peer"] = _start_peer(install, model, ask, load_now)
        for side, (start, memory_now) in found.items():
            if number >= 0:
                starts[side].append(start)
                print(f"{side} {number}: {start}, {memory_now / 1e9:.2f} GB", flush=True)
            if load_now and side != "decoder":
                memory[side] = memory_now
    return {name: Side(tuple(ones), memory.get(name)) for name, ones in starts.items() if ones}


def _start_stack(model: pathlib.Path, ask: Ask, load: Sequence[Ask], *, num_encoders: int = 1) -> tuple[Start, int]:
    pool = ["--num-kv-blocks", str(_NUM_KV_BLOCKS), "--block-size", str(_BLOCK_SIZE)]
    started_s = time.monotonic()
    with (
        LocalStack(model, num_encoders=num_encoders, decoder_arguments=pool) as stack,
        Client.connect(stack.decoder_targets[0], timeout_s=_TIMEOUT_S) as client,
    ):
        ready_s = time.monotonic() - started_s
        client.generate(ask.question, ask.pictures, max_tokens=1, temperature=0.0)
        first_token_s = time.monotonic() - started_s
        if load:
            run_burst(stack, load, 1)
        assert stack.redis is not None
        pids = {
            "Redis": [stack.redis.pid],
            "encoder": [process.pid for process in stack.encoders],
            "decoder": [process.pid for process in stack.decoders],
        }
        print(", ".join(f"{name} {memory_bytes(found) / 1e6:.0f} MB" for name, found in pids.items()), flush=True)
        return Start(ready_s, first_token_s), memory_bytes([pid for found in pids.values() for pid in found])


def _start_peer(install: PeerInstall, model: pathlib.Path, ask: Ask, load: Sequence[Ask]) -> tuple[Start, int]:
    prompts = PeerPrompts(model)
    request, *others = [prompts.request(one.question, one.pictures, 1) for one in [ask, *load]]
    kv_cache_bytes = _NUM_KV_BLOCKS * _BLOCK_SIZE * kv_token_bytes(model)
    started_s = time.monotonic()
    with Peer(install, model, kv_cache_bytes=kv_cache_bytes) as peer:
        peer.run([request])
        first_token_s = time.monotonic() - started_s
        if others:
            peer.run(others)
        return Start(peer.start_s, first_token_s), peer.memory_bytes()


def _section(model: pathlib.Path, sides: dict[str, Side]) -> str:
    names = {
        "stack": "Redis, encoder and decoder; a picture",
        "decoder": "decoder alone; text",
        "peer": "peer; a picture",
    }
    head = ["", "ready", "first token", "least … most", "memory"]
    rows = [
        [
            names[name],
            f"{statistics.median(one.ready_s for one in side.starts):.1f} s",
            f"{statistics.median(one.first_token_s for one in side.starts):.1f} s",
            f"{min(one.first_token_s for one in side.starts):.1f} … "
            f"{max(one.first_token_s for one in side.starts):.1f} s",
            "–" if side.memory_bytes is None else f"{side.memory_bytes / 1e9:.2f} GB",
        ]
        for name, side in sides.items()
    ]
    question = (
        f"## startup\n\nFrom the start of the processes to the first token: goal at most {_GOAL_S:g} s. Memory: goal "
        f"at most {_MEMORY_GOAL:g} of the\npeer's, with as many bytes of keys and values."
    )
    kv_cache_bytes = _NUM_KV_BLOCKS * _BLOCK_SIZE * kv_token_bytes(model)
    note = (
        f"Model `{model.name}`, {len(sides['stack'].starts)} interleaved starts, medians; files are in the page cache. "
        f"Memory: of all processes, shared pages\ncounted once, with {kv_cache_bytes / 1e6:.0f} MB for keys and values "
        f"after requests that fill them. {_against_peer(sides)}"
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{note}"


def _against_peer(sides: dict[str, Side]) -> str:
    if "peer" not in sides:
        return "Peer: not run."
    pairs = zip(sides["stack"].starts, sides["peer"].starts, strict=True)
    times = statistics.median(ours.first_token_s / theirs.first_token_s for ours, theirs in pairs)
    ours_bytes, their_bytes = sides["stack"].memory_bytes, sides["peer"].memory_bytes
    assert ours_bytes is not None
    assert their_bytes is not None
    return f"Ours ÷ the peer's: first token {times:.3f}, memory {ours_bytes / their_bytes:.2f}."


if __name__ == "__main__":
    main()
