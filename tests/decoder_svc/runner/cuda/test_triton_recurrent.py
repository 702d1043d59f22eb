"""Recurrent layers in Triton's interpreter: transformers' forms, from any state, with any division of tokens."""

from __future__ import annotations

import random

import pytest
import torch

from decoder_svc.runner.recurrent import short_convolution
from decoder_svc.runner.recurrent.state_pools import StatePool, StateShape
from decoder_svc.runner.state_step import StateStep, state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse
from tests.decoder_svc.runner.cuda.interpreted_triton import triton_recurrent
from tests.decoder_svc.runner.delta_states import (
    NUM_SLOTS,
    NUM_SNAPSHOTS,
    POOL,
    Sizes,
    check_cuts,
    check_recurrent_form,
)

DELTA = triton_recurrent.TritonDeltaStep()
# Heads of one, and of several, blocks of columns; keys that are padded; several heads of values for one of keys.
SIZES = [Sizes(1, 1, 4, 1), Sizes(2, 2, 12, 2), Sizes(1, 3, 16, 3), Sizes(3, 1, 33, 2)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_computes_transformers_recurrent_form_behind_a_convolution(sizes: Sizes, seed: int) -> None:
    check_recurrent_form(DELTA, sizes, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(sizes: Sizes, seed: int) -> None:
    check_cuts([DELTA], sizes, seed, torch.float32)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_taps", [1, 2, 3, 5])
def test_convolutions_are_those_of_pytorch_s_operators(num_taps: int, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_channels = rng.choice((4, 130))
    pools = [StatePool(StateShape((0, 0, 0), (num_channels, num_taps - 1), torch.float32)) for _ in range(2)]
    windows = torch.randn(POOL.num_states, num_channels, num_taps - 1, generator=generator)
    for pool in pools:
        pool.allocate(POOL, torch.device("cpu"))
        pool.windows.copy_(windows)
    slots = rng.sample(range(NUM_SLOTS), 4)
    free = rng.sample(range(NUM_SNAPSHOTS), NUM_SNAPSHOTS)
    lengths = [rng.choice((1, 1, 2, 11)) for _ in slots]
    starts = [rng.choice((0, 7)) for _ in slots]
    uses = [
        StateUse(slots[0], free[0], ()),
        StateUse(slots[1], None, ((starts[1] + 1, free[1]), (starts[1] + lengths[1], free[2]))[: lengths[1]]),
        *(StateUse(slot, None, ()) for slot in slots[2:]),
    ]
    kv_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
    step = StateStep.of(state_arrays(uses, kv_lens, lengths, POOL), lambda one: one)
    mixed = torch.randn(sum(lengths), 3 * num_channels, generator=generator)
    filters = torch.randn(num_taps, num_channels, generator=generator)
    bias = torch.randn(num_channels, generator=generator) if seed % 2 else None
    found = triton_recurrent.TritonConvolutionStep()(mixed, pools[0], filters, bias, step)
    expected = short_convolution.convolve(mixed, pools[1], filters, bias, step)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(pools[0].windows, pools[1].windows)


def test_sequences_without_tokens_leave_their_states() -> None:
    """In recorded steps, some sequences have none."""
    pool = StatePool(StateShape((0, 0, 0), (4, 2), torch.float32))
    pool.allocate(POOL, torch.device("cpu"))
    pool.windows.fill_(7.0)
    pool.windows[NUM_SLOTS + 2] = 3.0
    uses = [StateUse(0, 2, ()), StateUse(1, None, ())]
    step = StateStep.of(state_arrays(uses, [5, 3], [0, 3], POOL), lambda one: one)
    triton_recurrent.convolve(torch.ones(3, 4), pool, torch.ones(3, 4), None, step)
    assert torch.equal(pool.windows[0], torch.full((4, 2), 7.0))
    assert torch.equal(pool.windows[1], torch.ones(4, 2))
