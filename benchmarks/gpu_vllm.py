"""Asks vLLM's offline engine on one device what our engine and our whole system are asked, for `benchmarks.gpu`."""

from __future__ import annotations

import pathlib
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import models
from benchmarks.engine_thread import EngineThread
from benchmarks.gpu_service import NUM_TOKENS, REQUESTS_EACH
from benchmarks.peer import Peer, PeerInstall, PeerPrompts
from benchmarks.peer import PeerRequest as Request
from lookonce.commands.bench.drawing import draw_picture

_QUESTION = "What is in the picture?"
_SIZE_PX = 448
_BLOCK_SIZE = 16
_NUM_ROUNDS = 3
# Ids that the tokenizers of our models have for plain text.
_FIRST_ID, _STOP_ID = 300, 900


def vllm_cells(
    folder: pathlib.Path,
    install: PeerInstall,
    callers: Sequence[int],
    context: int,
    options: Mapping[str, Any],
    *,
    num_tokens: int = NUM_TOKENS,
    device: str = "cuda",
) -> Iterator[dict[str, Any]]:
    """Yields the seconds of the peer's start, its answers about pictures, and steps of both engines without pictures.

    Pictures: tokens per second of `callers` requests at once, four times, first about new pictures and then about the
    same ones. The most callers have all their requests in the queue from the beginning. Steps: behind a prompt of
    `context` tokens that is in the prefix cache, both engines in turns. `options` are further arguments of `vllm.LLM`.
    """
    longest = max(context, 512) + num_tokens + _BLOCK_SIZE
    num_blocks = (max(callers) + 2) * -(-longest // _BLOCK_SIZE)
    kv_bytes = models.kv_token_bytes(folder) * num_blocks * _BLOCK_SIZE
    with Peer(
        install,
        folder,
        kv_cache_bytes=kv_bytes * 5 // 4,
        dtype="bfloat16",
        max_context_tokens=longest,
        options={"max_num_seqs": max(callers), **options},
    ) as theirs:
        yield {"start_s": theirs.start_s, "version": theirs.version}
        for number in callers:
            yield from _pictures(folder, theirs, number, num_tokens, at_once=number == max(callers))
        flags = ["--num-kv-blocks", num_blocks, "--max-num-seqs", max(callers), "--dtype", "bfloat16"]
        with EngineThread(["--model", str(folder), "--device", device, *map(str, flags)]) as ours:
            for number in callers:
                yield _steps(ours, theirs, number, context, num_tokens)


def _pictures(
    folder: pathlib.Path, theirs: Peer, callers: int, num_tokens: int, *, at_once: bool
) -> Iterator[dict[str, Any]]:
    prompts = PeerPrompts(folder)
    numbers = random.Random(callers)

    def asked(number: int) -> list[Request]:
        pictures = (draw_picture(numbers, _SIZE_PX) for _ in range(number))
        return [prompts.request(_QUESTION, [picture], num_tokens) for picture in pictures]

    # The first request warms the engine up.
    theirs.run(asked(1))
    requests = asked(REQUESTS_EACH * callers)
    size = len(requests) if at_once else callers
    waves = [requests[first : first + size] for first in range(0, len(requests), size)]
    for reuse in (0.0, 1.0):
        runs = [theirs.run(wave) for wave in waves]
        answers = [answer for run in runs for answer in run.answers]
        yield {
            "callers": callers,
            "reuse": reuse,
            "tokens": num_tokens,
            "completion_tokens_per_s": len(requests) * num_tokens / sum(run.duration_s for run in runs),
            "first_token_s": statistics.median(answer.first_token_s for answer in answers),
            "cached_share": statistics.mean(answer.num_cached_tokens / answer.num_prompt_tokens for answer in answers),
        }


def _steps(ours: EngineThread, theirs: Peer, batch: int, context: int, num_tokens: int) -> dict[str, Any]:
    numbers = random.Random(batch)
    prompts = [tuple(numbers.randrange(_FIRST_ID, _STOP_ID) for _ in range(context)) for _ in range(batch)]
    requests = [Request(prompt, (), num_tokens) for prompt in prompts]
    ours_s, theirs_s = [], []
    for number in range(_NUM_ROUNDS + 1):
        own = [answer.decode_s for answer in ours.run(prompts, num_tokens)]
        other = [answer.decode_s for answer in theirs.run(requests).answers]
        # The first round fills both prefix caches.
        if number:
            ours_s.append(statistics.median(own) / (num_tokens - 1))
            theirs_s.append(statistics.median(other) / (num_tokens - 1))
    return {"batch": batch, "context": context, "ours_s": ours_s, "theirs_s": theirs_s}
