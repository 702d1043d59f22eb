"""The kernel for penalties in Triton's interpreter, against PyTorch's operators, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decoder_svc.runner.sampling.device_penalties import IN_PROMPT, penalised_logits
from tests.decoder_svc.runner.cuda.interpreted_triton import triton_penalties

NUM_SLOTS = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [7, 1024, 3001])
@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, torch.inf])
def test_the_kernel_has_every_bit_of_the_operators(dtype: torch.dtype, vocab: int, largest: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    slots = torch.tensor([3, 0, 4, 1])
    logits = (torch.randn(len(slots), vocab, generator=generator) * 9).to(dtype)
    logits[:, :7] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 6e4, -6e4]).to(dtype)
    numbers = torch.rand(len(slots), 4, generator=generator) * 3 - 0.5
    numbers[:, 0] = torch.tensor([1.05, 1e-40, 0.7, 1.0])
    numbers[:, 3] = largest
    in_output = torch.randint(0, 40, (NUM_SLOTS, vocab), generator=generator, dtype=torch.int32) - 20
    in_prompt = torch.randint(0, 2, (NUM_SLOTS, vocab), generator=generator, dtype=torch.int32)
    counts = in_output.clamp(min=0) + in_prompt * IN_PROMPT
    # The row of the empty slot keeps its logits.
    counts[4] = 0
    before = logits.clone()
    # The interpreter computes in NumPy, which warns where a GPU does not.
    with np.errstate(over="ignore", invalid="ignore"):
        found = triton_penalties.penalised_logits(logits, counts, slots, numbers)
    wanted = penalised_logits(logits, counts, slots, numbers)
    # NaN may have any bits.
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(1.5).view(torch.int32), wanted.nan_to_num(1.5).view(torch.int32))
    assert torch.equal(found[2].nan_to_num(1.5), logits[2].float().nan_to_num(1.5))
    assert torch.equal(logits.nan_to_num(1.5), before.nan_to_num(1.5))


def test_rows_that_are_not_contiguous() -> None:
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).t()
    counts = torch.ones(2, 50, dtype=torch.int32)
    arguments = counts, torch.tensor([1, 0, 1]), torch.tensor([[1.3, 0.2, 0.1, torch.inf]] * 3)
    assert torch.equal(triton_penalties.penalised_logits(logits, *arguments), penalised_logits(logits, *arguments))
