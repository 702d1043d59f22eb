"""Short convolutions on the sequences of a step: transformers' module on whole sequences, however they are divided."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from decoder_svc.runner.attention import SdpaBackend, forward_context
from decoder_svc.runner.cpu.attention import SOURCES
from decoder_svc.runner.cpu.native_convolution import NativeConvolutionStep
from decoder_svc.runner.recurrent.recurrent_layers import lone_step
from decoder_svc.runner.recurrent.short_convolution import ConvolutionStep, ShortConvolution
from decoder_svc.runner.state_step import PoolSizes
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.kernels.native_library import load_library

HIDDEN_SIZE = 48
POOL = PoolSizes(num_slots=4, num_snapshots=6)


@pytest.fixture(params=["operators", "native"])
def kernel(request: pytest.FixtureRequest) -> ConvolutionStep | None:
    """Returns our kernel, or None for PyTorch's operators."""
    if request.param == "operators":
        return None
    request.getfixturevalue("library")
    return NativeConvolutionStep(load_library(SOURCES), 2)


def module(num_taps: int, *, has_bias: bool) -> Lfm2ShortConv:
    torch.manual_seed(num_taps)
    config = Lfm2Config(
        hidden_size=HIDDEN_SIZE, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=num_taps, conv_bias=has_bias
    )
    return Lfm2ShortConv(config, 0).requires_grad_(requires_grad=False)


def computed(layer: ShortConvolution, parts: list[tuple[StateUse, int, Tensor]]) -> list[Tensor]:
    """Computes one step: for each sequence its states, its first new token, and the new tokens' hidden states."""
    uses, starts, tokens = zip(*parts, strict=True)
    lengths = [len(each) for each in tokens]
    metadata = lone_step(uses, starts, lengths, POOL, lambda numbers: numbers)
    with forward_context(SdpaBackend(), metadata):
        output = layer(torch.cat(tokens)[None])
    return list(output[0].split(lengths))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_taps", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_any_division_gives_what_the_module_gives_for_whole_sequences(
    kernel: ConvolutionStep | None, num_taps: int, seed: int, has_bias: bool
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    reference = module(num_taps, has_bias=has_bias)
    layer = ShortConvolution(reference, torch.float32, kernel)
    assert layer.has_kernel == (kernel is not None)
    layer.pool.allocate(POOL, torch.device("cpu"))
    wholes = [torch.randn(rng.randint(1, 30), HIDDEN_SIZE, generator=generator) for _ in range(4)]
    slots = rng.sample(range(POOL.num_slots), len(wholes))
    done, found = [0] * len(wholes), [[torch.empty(0, HIDDEN_SIZE)] for _ in wholes]
    while any(count < len(whole) for count, whole in zip(done, wholes, strict=True)):
        parts, indexes = [], []
        for index, whole in enumerate(wholes):
            length = min(rng.choice((0, 1, 1, 4, 9)), len(whole) - done[index])
            if length:
                indexes.append(index)
                parts.append((StateUse(slots[index], None, ()), done[index], whole[done[index] : done[index] + length]))
        for index, output in zip(indexes, computed(layer, parts) if parts else [], strict=True):
            found[index].append(output)
            done[index] += len(output)
    for whole, pieces in zip(wholes, found, strict=True):
        torch.testing.assert_close(torch.cat(pieces), reference(whole[None])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_sequence_that_begins_with_a_snapshot_continues_the_other_bit_by_bit(
    kernel: ConvolutionStep | None, seed: int
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layer = ShortConvolution(module(3, has_bias=False), torch.float32, kernel)
    layer.pool.allocate(POOL, torch.device("cpu"))
    number = rng.randint(2, 20)
    whole = torch.randn(number, HIDDEN_SIZE, generator=generator)
    first, second = sorted(rng.choices(range(1, number), k=2))
    taken = {first: 4, second: 1}
    beside = torch.randn(3, HIDDEN_SIZE, generator=generator)
    _, expected = computed(
        layer,
        [(StateUse(1, None, ()), 0, beside), (StateUse(0, None, tuple(taken.items())), 0, whole)],
    )
    for seen, snapshot in taken.items():
        continued, _ = computed(
            layer, [(StateUse(2, snapshot, ()), seen, whole[seen:]), (StateUse(1, None, ()), 3, beside)]
        )
        assert torch.equal(continued, expected[seen:])


@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_rounds_where_operators_store(library: None, seed: int) -> None:
    """In bfloat16, numbers differ by what sums in another order of rounding give, at most a unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    reference = module(3, has_bias=seed % 2 == 1).to(torch.bfloat16)
    layers = [
        ShortConvolution(reference, torch.bfloat16, each)
        for each in (None, NativeConvolutionStep(load_library(SOURCES), 2))
    ]
    steps = [
        [(StateUse(0, None, ((2, 1),)), 0, 5), (StateUse(3, None, ()), 0, 1)],
        [(StateUse(3, None, ()), 1, 1), (StateUse(1, 1, ()), 2, 4), (StateUse(0, None, ()), 5, 3)],
    ]
    for layer in layers:
        layer.pool.allocate(POOL, torch.device("cpu"))
    for step in steps:
        parts = [
            (use, start, torch.randn(length, HIDDEN_SIZE, generator=generator).to(torch.bfloat16))
            for use, start, length in step
        ]
        expected, found = (torch.cat(computed(layer, parts)) for layer in layers)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
        assert torch.equal(layers[0].pool.windows, layers[1].pool.windows)


def test_what_the_kernel_does_not_know_is_left_to_operators(library: None) -> None:
    kernel = NativeConvolutionStep(load_library(SOURCES), 1)
    assert kernel.can_compute(48, 8, torch.bfloat16)
    assert not kernel.can_compute(40, 3, torch.float32)
    assert not kernel.can_compute(48, 9, torch.float32)
    assert not kernel.can_compute(48, 3, torch.float16)
