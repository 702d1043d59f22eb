"""Sends requests that begin together through the SDK, to the decoders in turns or as the SDK places them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from benchmarks.workloads import Ask
from lookonce.client import Client
from lookonce.generation import Generation
from lookonce.local.local_stack import LocalStack
from lookonce.sdk.connection.target import Target

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Burst:
    """The answers of one burst and its cost."""

    # From the first request to the last answer, seconds.
    duration_s: float
    # User and system CPU time of the decoders during the burst, seconds.
    decoder_cpu_s: float
    # Answers in the order of the requests.
    answers: tuple[Generation, ...]
    num_encodes: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(answer.usage.prompt_tokens for answer in self.answers)

    @property
    def num_cached_tokens(self) -> int:
        return sum(answer.usage.cached_prompt_tokens for answer in self.answers)


def run_burst(stack: LocalStack, asks: Sequence[Ask], max_tokens: int, *, routed: bool = False) -> Burst:
    """Runs `ask_together` on a stack and adds the CPU time that the decoders took."""
    decoders = [psutil.Process(decoder.pid) for decoder in stack.decoders]
    encodes, cpu_s = _num_encodes(stack), sum(map(_cpu_s, decoders))
    duration_s, answers = ask_together(stack.decoder_targets, asks, max_tokens, routed=routed)
    cpu_s = sum(map(_cpu_s, decoders)) - cpu_s
    return Burst(duration_s, cpu_s, answers, _num_encodes(stack) - encodes)


def ask_together(
    targets: Sequence[str], asks: Sequence[Ask], max_tokens: int, *, routed: bool = False
) -> tuple[float, tuple[Generation, ...]]:
    """Returns the seconds from first request to last answer, and the answers in the order of the requests.

    Greedy, each with exactly `max_tokens` tokens; request i goes to target i modulo their number. If `routed`, one
    client knows all targets and places the requests.
    """
    together = threading.Barrier(len(asks) + 1)

    def one(client: Client, ask: Ask) -> Generation:
        together.wait(_TIMEOUT_S)
        return client.generate(ask.question, ask.pictures, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    with contextlib.ExitStack() as exits:
        of_clients: list[Target] = [targets] if routed else [*targets]
        clients = [
            exits.enter_context(Client.connect(target, timeout_s=_TIMEOUT_S, max_retries=0)) for target in of_clients
        ]
        pool = exits.enter_context(ThreadPoolExecutor(len(asks)))
        waiting = [pool.submit(one, clients[index % len(clients)], ask) for index, ask in enumerate(asks)]
        together.wait(_TIMEOUT_S)
        started_s = time.monotonic()
        answers = tuple(answer.result() for answer in waiting)
        return time.monotonic() - started_s, answers


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _num_encodes(stack: LocalStack) -> int:
    return int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))
