"""vLLM's offline engine behind JSON lines, run by the peer's own interpreter. Started by benchmarks/peer.py.

Needs nothing of Lookonce. The first line names the model and the arguments of `vllm.LLM`; each further line is one
command, and each gets one line of answer on what was standard output. What vLLM prints goes to standard error.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO


class Worker:
    """One engine and the commands on it."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        """`options` are keyword arguments of `vllm.LLM`."""
        import vllm  # type: ignore[import-not-found,unused-ignore]

        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(model, disable_log_stats=False, **options)
        self.version = str(vllm.__version__)

    def run(self, requests: list[dict[str, Any]], *, one_by_one: bool) -> dict[str, Any]:
        """Answers all requests, at once or each after the one before; greedy, with exactly `max_tokens` tokens."""
        started_s = time.perf_counter()
        prompts = [_prompt(request) for request in requests]
        params = [
            self._sampling(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=True)
            for request in requests
        ]
        if one_by_one:
            pairs = zip(prompts, params, strict=True)
            outputs = [self._llm.generate([one], [each], use_tqdm=False)[0] for one, each in pairs]
        else:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return {"duration_s": time.perf_counter() - started_s, "answers": [_answer(output) for output in outputs]}

    def reset(self) -> dict[str, Any]:
        """Empties the prefix cache and the image cache."""
        self._llm.reset_prefix_cache()
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        return {}


def _prompt(request: dict[str, Any]) -> dict[str, Any]:
    """The prompt with one placeholder per image, and the decoded images; decoding is part of the request."""
    import PIL.Image

    prompt: dict[str, Any] = {"prompt_token_ids": request["token_ids"]}
    if request["images"]:
        files = [io.BytesIO(base64.b64decode(image)) for image in request["images"]]
        prompt["multi_modal_data"] = {"image": [PIL.Image.open(file).convert("RGB") for file in files]}
    return prompt


def _answer(output: Any) -> dict[str, Any]:
    """Times are seconds: from the request's arrival to its first token, and from there to its last."""
    metrics = output.metrics
    return {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens or 0,
        "token_ids": list(output.outputs[0].token_ids),
        "first_token_s": metrics.first_token_latency,
        "decode_s": metrics.last_token_ts - metrics.first_token_ts,
    }


def _lines() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _own_stdout() -> TextIO:
    """Standard output for answers only; everybody else's goes to standard error, the engine's processes' included."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


def main() -> None:
    """Serves commands until standard input ends."""
    answers = _own_stdout()
    lines = _lines()
    first = next(lines)
    os.sched_setaffinity(0, first["cpus"])
    worker = Worker(first["model"], first["options"])
    print(json.dumps({"version": worker.version}), file=answers)
    for line in lines:
        if line["command"] == "run":
            answer = worker.run(line["requests"], one_by_one=line["one_by_one"])
        elif line["command"] == "reset":
            answer = worker.reset()
        else:
            raise ValueError(f"unknown command {line['command']!r}")
        print(json.dumps(answer), file=answers)


# vLLM starts processes that import this file anew.
if __name__ == "__main__":
    main()
