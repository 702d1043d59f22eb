"""Recurrent layers in Triton's interpreter: reference forms, from any state, with any division of tokens."""

from __future__ import annotations

import random

import pytest
import torch

from decoder_svc.runner.recurrent import short_convolution
from decoder_svc.runner.recurrent.mamba2 import Mamba2
from decoder_svc.runner.recurrent.state_pools import StatePool, StateShape
from decoder_svc.runner.state_step import StateStep, state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse
from tests.decoder_svc.runner import scan_states
from tests.decoder_svc.runner.cuda.interpreted_triton import triton_recurrent
from tests.decoder_svc.runner.cuda.triton_recurrent_kernels import report_softplus
from tests.decoder_svc.runner.delta_states import (
    NUM_SLOTS,
    NUM_SNAPSHOTS,
    POOL,
    Sizes,
    check_cuts,
    check_recurrent_form,
)

DELTA, SCAN = triton_recurrent.TritonDeltaStep(), triton_recurrent.TritonScanStep()
# Heads of one, and of several, blocks of columns; keys that are padded; several heads of values for one of keys.
SIZES = [Sizes(1, 1, 4, 1), Sizes(2, 2, 12, 2), Sizes(1, 3, 16, 3), Sizes(3, 1, 33, 2)]
# One group and several; heads that are padded, also to several blocks of columns; one tap and several.
SCAN_SIZES = [
    scan_states.Sizes(1, 1, 4, 8, num_taps=1),
    scan_states.Sizes(2, 1, 12, 5, has_bias=False),
    scan_states.Sizes(1, 3, 16, 16, num_taps=2),
    scan_states.Sizes(2, 2, 5, 33, num_taps=5),
]


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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sizes", SCAN_SIZES, ids=str)
def test_a_mamba2_layer_is_the_recurrence_however_sequences_are_divided(sizes: scan_states.Sizes, seed: int) -> None:
    scan_states.check_divisions(SCAN, sizes, seed)


# float16 replaces bfloat16, which the interpreter does not support.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", SCAN_SIZES, ids=str)
def test_a_token_of_a_mamba2_layer_has_the_same_bits_however_its_prompt_is_cut(
    sizes: scan_states.Sizes, seed: int, dtype: torch.dtype
) -> None:
    scan_states.check_cuts([SCAN], sizes, seed, dtype)


def test_a_mamba2_layer_continues_from_snapshots_and_does_not_clamp_time_steps() -> None:
    scan_states.check_snapshots(SCAN, 0)
    scan_states.check_module(SCAN, 0)
    scan_states.check_small_time_steps(SCAN)


def test_a_mamba2_layer_keeps_the_state_in_front_of_each_draft() -> None:
    """Two sequences with drafts, one without, and single tokens that continue from the copies."""
    layer = scan_states.layer_of(scan_states.module(scan_states.Sizes()), SCAN)
    whole = torch.randn(9, scan_states.HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    (expected,) = scan_states.computed(layer, [(StateUse(4, None, ()), 0, whole)])
    parts = [(StateUse(slot, None, ()), 0, whole[:5]) for slot in range(3)]
    scan_states.computed(layer, parts)
    drafts = [
        (StateUse(0, None, ((6, 0), (7, 1), (8, 2))), 5, whole[5:8]),
        (StateUse(1, None, ((6, 3), (7, 4))), 5, torch.cat((whole[5:6], -whole[6:7]))),
        (StateUse(2, None, ()), 5, whole[5:6]),
    ]
    scan_states.computed(layer, drafts)
    # The second draft of the first sequence was rejected, and the only one of the second sequence, too.
    after = [
        (StateUse(0, 1, ()), 7, whole[7:8]),
        (StateUse(1, 3, ()), 6, whole[6:7]),
        (StateUse(2, None, ()), 6, whole[6:7]),
    ]
    found = scan_states.computed(layer, after)
    for one, index in zip(found, (7, 6, 6), strict=True):
        torch.testing.assert_close(one[0], expected[index], rtol=1e-5, atol=1e-5)


def test_mamba2_heads_of_other_sizes_are_left_to_operators() -> None:
    assert SCAN.can_compute(64, 128, 4, torch.bfloat16)
    assert SCAN.can_compute(80, 256, 16, torch.float16)
    assert not SCAN.can_compute(64, 257, 4, torch.bfloat16)
    assert not SCAN.can_compute(64, 128, 17, torch.bfloat16)
    assert not SCAN.can_compute(64, 128, 4, torch.int8)
    mixer = scan_states.module(scan_states.Sizes(state_size=300))
    assert not Mamba2(mixer, torch.float32, SCAN).has_kernel


def test_softplus_has_all_digits_at_any_number() -> None:
    """Small time steps are those of tokens that change a state little, and many such tokens add up."""
    numbers = torch.linspace(-80, 40, 1024)
    found = torch.empty(1024)
    report_softplus[(1,)](numbers, found, NUM=1024)
    torch.testing.assert_close(found.double(), torch.log1p(numbers.double().exp()), rtol=3e-7, atol=0)
