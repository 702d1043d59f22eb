"""Short convolutions on the sequences of a step: transformers' module on whole sequences, however they are divided."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata, SdpaBackend, forward_context
from decoder_svc.runner.recurrent.short_convolution import ShortConvolution
from decoder_svc.runner.state_step import PoolSizes, StateStep, state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse

HIDDEN_SIZE = 24
POOL = PoolSizes(num_slots=4, num_snapshots=6)


def module(num_taps: int, *, has_bias: bool) -> Lfm2ShortConv:
    torch.manual_seed(num_taps)
    config = Lfm2Config(
        hidden_size=HIDDEN_SIZE, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=num_taps, conv_bias=has_bias
    )
    return Lfm2ShortConv(config, 0).requires_grad_(requires_grad=False)


def computed(layer: ShortConvolution, parts: list[tuple[StateUse, int, Tensor]]) -> list[Tensor]:
    """Computes one step: for each sequence its states, its first new token, and the new tokens' hidden states."""
    uses = tuple(use for use, _, _ in parts)
    lengths = tuple(len(tokens) for _, _, tokens in parts)
    kv_lens = tuple(start + len(tokens) for _, start, tokens in parts)
    metadata = AttentionMetadata(
        full=BlockMetadata(torch.empty(0), (), ()),
        sliding=None,
        query_lens=lengths,
        kv_lens=kv_lens,
        mutual_spans=((),) * len(parts),
        is_mutual_beyond_window=False,
        states=uses,
        state_step=StateStep.of(state_arrays(uses, kv_lens, lengths, POOL), lambda numbers: numbers),
    )
    with forward_context(SdpaBackend(), metadata):
        output = layer(torch.cat([tokens for _, _, tokens in parts])[None])
    return list(output[0].split(lengths))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_taps", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_any_division_gives_what_the_module_gives_for_whole_sequences(num_taps: int, seed: int, has_bias: bool) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    reference = module(num_taps, has_bias=has_bias)
    layer = ShortConvolution(reference, torch.float32, None)
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
def test_a_sequence_that_begins_with_a_snapshot_continues_the_other_bit_by_bit(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layer = ShortConvolution(module(3, has_bias=False), torch.float32, None)
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
