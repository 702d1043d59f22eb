"""A Triton kernel that penalises logits by the device's counts of tokens, in one pass over both.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoder_svc.runner.sampling.device_penalties import IN_PROMPT

# Logits of a program.
_COLUMNS = 1024


@triton.jit
def _penalise(
    logits, counts, slots, numbers, output,
    VOCAB: tl.constexpr, NUM_COLUMNS: tl.constexpr, IN_PROMPT: tl.constexpr,
):  # fmt: skip
    """Penalises a part of one row. Grid: rows, parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    is_column = columns < VOCAB
    slot = tl.load(slots + row)
    repetition = tl.load(numbers + row * 4)
    presence = tl.load(numbers + row * 4 + 1)
    frequency = tl.load(numbers + row * 4 + 2)
    largest = tl.load(numbers + row * 4 + 3)
    scores = tl.load(logits + row * VOCAB + columns, mask=is_column, other=0.0).to(tl.float32)
    count = tl.load(counts + slot * VOCAB + columns, mask=is_column, other=0)
    # `/` is not rounded to nearest in Triton. Comparisons with NaN are false, so NaN stays.
    repeated = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
    repeated = tl.where(repeated > largest, largest, repeated)
    repeated = tl.where(repeated < -largest, -largest, repeated)
    occurrences = (count & (IN_PROMPT - 1)).to(tl.float32)
    subtracted = tl.where(occurrences > 0, presence + frequency * occurrences, 0.0)
    tl.store(output + row * VOCAB + columns, tl.where(count > 0, repeated - subtracted, scores), mask=is_column)


def penalised_logits(logits: Tensor, counts: Tensor, slots: Tensor, numbers: Tensor) -> Tensor:
    """Does the same as the function of PyTorch with the same name, to the last bit."""
    num_rows, vocab = logits.shape
    output = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    # A fused product and sum would be rounded once and not twice.
    _penalise[(num_rows, triton.cdiv(vocab, _COLUMNS))](
        logits.contiguous(), counts, slots, numbers, output,
        VOCAB=vocab, NUM_COLUMNS=_COLUMNS, IN_PROMPT=IN_PROMPT, enable_fp_fusion=False,
    )  # fmt: skip
    return output
