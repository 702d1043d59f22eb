"""vLLM's vision tower and projector behind JSON lines, run by the peer's own interpreter. Started by encode_speed.py.

Needs nothing of Lookonce. The first line names the model, the element type, the CPUs and a file of pixels; each further
line is one command, and each gets one line of answer on what was standard output. What vLLM prints goes to standard
error. The engine is in this process and compiles nothing: the tower is run as it is in any case, only the language
model would be compiled, which is not asked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


class Worker:
    """One engine, of which only the encoder is used."""

    def __init__(self, model: str, dtype: str, pixels: str) -> None:
        """`pixels` is a file of float32 [num_images, 3, height, width], as the image processor gives them."""
        import numpy as np
        import torch
        import vllm  # type: ignore[import-not-found,unused-ignore]

        engine = vllm.LLM(
            model, dtype=dtype, max_model_len=2048, enforce_eager=True, kv_cache_memory_bytes=256 << 20,
            limit_mm_per_prompt={"image": 1},
        )  # fmt: skip
        self.version = str(vllm.__version__)
        self._engine = engine
        self._pixels = torch.from_numpy(np.load(pixels)).to(getattr(torch, dtype))

    def encode(self, batch: int, num_images: int, rows_file: str | None) -> dict[str, Any]:
        """Encodes images, so many at a time; writes their rows, float32, where a file is named."""
        (answer,) = self._engine.apply_model(lambda model: self._timed(model, batch, num_images, rows_file))
        return dict(answer)

    def _timed(self, model: Any, batch: int, num_images: int, rows_file: str | None) -> dict[str, Any]:
        import numpy as np
        import torch

        rows = []
        with torch.inference_mode():
            started_s = time.perf_counter()
            for begin in range(0, num_images, batch):
                end = min(begin + batch, num_images)
                rows += list(model.embed_multimodal(pixel_values=self._pixels[begin:end]))
            duration_s = time.perf_counter() - started_s
            if rows_file is not None:
                np.save(rows_file, torch.stack(rows).float().numpy())
        return {"duration_s": duration_s, "num_threads": torch.get_num_threads()}


def _own_stdout() -> TextIO:
    """Standard output for answers only; everybody else's goes to standard error."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


def main() -> None:
    """Serves commands until standard input ends."""
    answers = _own_stdout()
    first = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, first["cpus"])
    worker = Worker(first["model"], first["dtype"], first["pixels"])
    print(json.dumps({"version": worker.version}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        answer = worker.encode(command["batch"], command["num_images"], command["rows_file"])
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
