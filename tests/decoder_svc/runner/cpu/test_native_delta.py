"""Single tokens of gated delta nets by our kernel: transformers' recurrent form, in any batch, from any state."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from decoder_svc.runner.cpu.attention import SOURCES
from decoder_svc.runner.cpu.native_delta import NativeDeltaStep
from decoder_svc.runner.recurrent.state_pools import StatePool, StateShape
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.kernels.native_library import load_library

pytestmark = pytest.mark.usefixtures("library")

NUM_SLOTS, NUM_SNAPSHOTS = 6, 3


def step(num_threads: int = 2) -> NativeDeltaStep:
    return NativeDeltaStep(load_library(SOURCES), num_threads)


def pool(heads: int, key_dim: int, value_dim: int, seed: int) -> StatePool:
    made = StatePool(StateShape((heads, key_dim, value_dim), (4, 3), torch.float32))
    made.allocate(NUM_SLOTS, NUM_SNAPSHOTS, torch.device("cpu"))
    made._matrices.copy_(torch.randn(made._matrices.shape, generator=torch.Generator().manual_seed(seed)))
    return made


def reference(mixed: Tensor, decay: Tensor, beta: Tensor, states: Tensor, num_key_heads: int) -> tuple[Tensor, Tensor]:
    _, num_value_heads, key_dim, value_dim = states.shape
    sizes = (num_key_heads * key_dim, num_key_heads * key_dim, num_value_heads * value_dim)
    query, key, value = mixed[:, None].split(sizes, dim=-1)
    output, after = torch_recurrent_gated_delta_rule(
        query.unflatten(-1, (-1, key_dim)),
        key.unflatten(-1, (-1, key_dim)),
        value.unflatten(-1, (-1, value_dim)),
        g=decay[:, None],
        beta=beta[:, None],
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output[:, 0], after


@settings(max_examples=60, deadline=None)
@given(
    num_key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=st.integers(1, 40),
    num_vectors=st.integers(1, 9),
    seed=st.integers(0, 10_000),
)
def test_it_computes_transformers_recurrent_form(
    num_key_heads: int, group: int, key_dim: int, num_vectors: int, seed: int
) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    heads, value_dim = num_key_heads * group, 16 * num_vectors
    slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
    uses = [StateUse(slot, rng.choice((None, None, *range(NUM_SNAPSHOTS))), ()) for slot in slots]
    starts = [rng.choice((0, 5)) for _ in uses]
    mixed = torch.randn(len(uses), 2 * num_key_heads * key_dim + heads * value_dim, generator=generator)
    decay = -torch.rand(len(uses), heads, generator=generator) * 3
    beta = torch.rand(len(uses), heads, generator=generator)
    states = pool(heads, key_dim, value_dim, seed)
    before = states._matrices.clone()
    expected, after = reference(mixed, decay, beta, states.read_matrices(uses, starts), num_key_heads)
    found = step(rng.choice((1, 2, 3)))(mixed, decay, beta, states.matrix_places(uses, starts), num_key_heads)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(states._matrices[slots], after, rtol=1e-4, atol=1e-4)
    others = [index for index in range(len(before)) if index not in slots]
    assert torch.equal(states._matrices[others], before[others]), "snapshots and other requests stay"


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    num_key_heads, heads, key_dim, value_dim = 2, 4, 32, 80
    mixed = torch.randn(NUM_SLOTS, 2 * num_key_heads * key_dim + heads * value_dim, generator=generator)
    decay, beta = -torch.rand(NUM_SLOTS, heads, generator=generator), torch.rand(NUM_SLOTS, heads, generator=generator)
    together, alone = pool(heads, key_dim, value_dim, 3), pool(heads, key_dim, value_dim, 3)
    uses = [StateUse(slot, None, ()) for slot in range(NUM_SLOTS)]
    starts = [5] * NUM_SLOTS
    found = step(3)(mixed, decay, beta, together.matrix_places(uses, starts), num_key_heads)
    for slot in range(NUM_SLOTS):
        one = slice(slot, slot + 1)
        places = alone.matrix_places(uses[one], [5])
        assert torch.equal(step(1)(mixed[one], decay[one], beta[one], places, num_key_heads), found[one])
    assert torch.equal(alone._matrices, together._matrices)


def test_heads_without_whole_vectors_are_left_to_pytorch() -> None:
    assert step().can_compute(8, 48)
    assert not step().can_compute(8, 24)
