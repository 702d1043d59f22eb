"""Measures the limits of the device and transformers' continuous batching, for `benchmarks.gpu`."""

from __future__ import annotations

import pathlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

_COPIED_BYTES = 1 << 30
_GEMM_SIZE = 8192
_NUM_REPEATS = 7
_NUM_ROUNDS = 5


def seconds_of(work: Callable[[], object], device: torch.device, num_repeats: int = _NUM_REPEATS) -> list[float]:
    """Returns the seconds of each repeat after a warm-up, with the device idle before each."""

    def once() -> float:
        _wait(device)
        started_s = time.perf_counter()
        work()
        _wait(device)
        return time.perf_counter() - started_s

    once()
    return [once() for _ in range(num_repeats)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_bandwidth(device: torch.device, num_bytes: int = _COPIED_BYTES) -> float:
    """Returns bytes per second of a large copy, counting reads and writes."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / statistics.median(seconds_of(lambda: target.copy_(source), device))


def matrix_peak(device: torch.device, size: int = _GEMM_SIZE) -> float:
    """Returns operations per second of a large matrix product in bfloat16."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / statistics.median(seconds_of(lambda: left @ right, device))


def continuous_batching_s(
    folder: pathlib.Path, device: torch.device, batch: int, prompt_tokens: int, num_tokens: int
) -> float | str:
    """Returns the seconds of transformers for the same text model and batch, or the reason why it does not run.

    The median of several rounds after a warm-up. Weights are random like ours: time does not depend on them.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    draw = random.Random(0)
    prompts = [[draw.randrange(config.vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
    generation = transformers.GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    try:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
        rounds = [
            model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False).values()
            for _ in range(_NUM_ROUNDS + 1)
        ][1:]
        # Seconds from the first accepted request to the end of the last one, without the set-up before.
        spans = [[output.lifespan for output in outputs] for outputs in rounds]
    except Exception as error:  # a peer that fails is a cell of the table
        return f"{type(error).__name__}"
    generated = [len(output.generated_tokens) for outputs in rounds for output in outputs]
    if generated != [num_tokens] * batch * _NUM_ROUNDS:
        return f"answered {sum(generated)} of {num_tokens * batch * _NUM_ROUNDS} tokens"
    return statistics.median(
        float(max(stop for _, stop in of_round) - min(start for start, _ in of_round)) for of_round in spans
    )
