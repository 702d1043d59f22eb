"""Random steps of gated delta nets from random states, and what transformers' recurrent form makes of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from decoder_svc.runner.recurrent.delta_net import DeltaStep
from decoder_svc.runner.recurrent.state_pools import StatePool, StateShape
from decoder_svc.runner.state_step import PoolSizes, StateStep, state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse

NUM_SLOTS, NUM_SNAPSHOTS = 6, 4
POOL = PoolSizes(NUM_SLOTS, NUM_SNAPSHOTS)
WINDOW = 3


@dataclass(frozen=True)
class Sizes:
    """The numbers that make up the shape of a layer."""

    num_key_heads: int
    group: int
    key_dim: int
    num_vectors: int

    @property
    def num_heads(self) -> int:
        return self.num_key_heads * self.group

    @property
    def value_dim(self) -> int:
        return 16 * self.num_vectors

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of channels of queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_heads * self.value_dim


@dataclass(frozen=True)
class Tokens:
    """The inputs that some tokens of a sequence give to the kernel."""

    mixed: Tensor
    decay: Tensor
    beta: Tensor

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.mixed[part], self.decay[part], self.beta[part])


def tokens(sizes: Sizes, number: int, seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(number, sum(sizes.parts), generator=generator).to(dtype)
    decay = -torch.rand(number, sizes.num_heads, generator=generator) * 3
    return Tokens(mixed, decay, torch.rand(number, sizes.num_heads, generator=generator))


class Layer:
    """A kernel with random filters and states."""

    def __init__(self, kernel: DeltaStep, sizes: Sizes, dtype: torch.dtype = torch.float32) -> None:
        self.sizes = sizes
        shape = StateShape((sizes.num_heads, sizes.key_dim, sizes.value_dim), (sum(sizes.parts), WINDOW), dtype)
        self.pool = StatePool(shape)
        self.pool.allocate(POOL, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        for states in (self.pool.matrices, self.pool.windows):
            states.copy_(torch.randn(states.shape, generator=generator))
        self.filters = torch.randn(WINDOW + 1, sum(sizes.parts), generator=generator)
        self._kernel = kernel

    def run(
        self, given_tokens: Tokens, uses: Sequence[StateUse], starts: Sequence[int], lengths: Sequence[int]
    ) -> Tensor:
        kv_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
        step = StateStep.of(state_arrays(uses, kv_lens, lengths, POOL), lambda one: one)
        return self._kernel(
            given_tokens.mixed,
            self.pool,
            self.filters,
            given_tokens.decay,
            given_tokens.beta,
            step,
            self.sizes.num_key_heads,
        )

    def reference(self, one: Tokens, window: Tensor, matrix: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Returns a sequence's outputs, its matrices after each token, and all inputs of the convolution."""
        sizes = self.sizes
        inputs = torch.cat([window.T, one.mixed])
        convolved = sum(inputs[j : j + len(one.mixed)].float() * self.filters[j] for j in range(WINDOW + 1))
        query, key, value = F.silu(convolved)[:, None, None].split(sizes.parts, dim=-1)
        outputs, matrices = [], []
        for index in range(len(one.mixed)):
            output, matrix = torch_recurrent_gated_delta_rule(
                query[index].unflatten(-1, (-1, sizes.key_dim)).repeat_interleave(sizes.group, 2),
                key[index].unflatten(-1, (-1, sizes.key_dim)).repeat_interleave(sizes.group, 2),
                value[index].unflatten(-1, (-1, sizes.value_dim)),
                g=one.decay[index, None, None],
                beta=one.beta[index, None, None],
                initial_state=matrix,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            outputs.append(output[0, 0])
            matrices.append(matrix)
        return torch.stack(outputs), matrices, inputs


# A key of one number is scaled to 1 or -1, so that rounding decides where it is near 0.
SIZES = st.builds(
    Sizes,
    num_key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=st.integers(4, 40),
    num_vectors=st.integers(1, 9),
)


def check_recurrent_form(kernel: DeltaStep, sizes: Sizes, seed: int) -> None:
    """Compares a random step with transformers' recurrent form behind a convolution."""
    rng = random.Random(seed)
    layer = Layer(kernel, sizes)
    slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
    lengths = [rng.choice((1, 1, rng.randint(2, 9))) for _ in slots]
    starts = [rng.choice((0, 5)) for _ in slots]
    free = rng.sample(range(NUM_SNAPSHOTS), NUM_SNAPSHOTS)
    uses = []
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        loaded = free.pop() if len(free) > 1 and rng.random() < 0.3 else None
        taken = [(start + rng.randint(1, length), free.pop())] if len(free) > 1 and rng.random() < 0.5 else []
        uses.append(StateUse(slot, loaded, tuple(taken)))
    given_tokens = tokens(sizes, sum(lengths), seed)
    begun = layer.pool.read(uses, starts)
    before = layer.pool.matrices.clone(), layer.pool.windows.clone()
    found = layer.run(given_tokens, uses, starts, lengths)
    changed = set()
    first = 0
    for index, (use, start, length) in enumerate(zip(uses, starts, lengths, strict=True)):
        part = slice(first, first + length)
        first += length
        expected, matrices, inputs = layer.reference(
            given_tokens[part], begun.windows[index], begun.matrices[index : index + 1]
        )
        assert torch.allclose(found[part], expected, rtol=1e-4, atol=1e-4)
        for num_seen, state in [(length, use.slot), *((seen - start, NUM_SLOTS + to) for seen, to in use.taken)]:
            changed.add(state)
            assert torch.allclose(layer.pool.matrices[state], matrices[num_seen - 1][0], rtol=1e-4, atol=1e-4)
            assert torch.equal(layer.pool.windows[state], inputs[num_seen : num_seen + WINDOW].T)
    others = [index for index in range(NUM_SLOTS + NUM_SNAPSHOTS) if index not in changed]
    for states, old in zip((layer.pool.matrices, layer.pool.windows), before, strict=True):
        assert torch.equal(states[others], old[others]), "other requests and snapshots stay"


def check_cuts(kernels: Sequence[DeltaStep], sizes: Sizes, seed: int, dtype: torch.dtype) -> None:
    """Compares the bits of a prompt's tokens, computed at once by the first kernel, and in pieces by the last one."""
    rng = random.Random(seed)
    number = rng.randint(1, 12)
    given_tokens = tokens(sizes, number, seed, dtype)
    whole, cut = Layer(kernels[0], sizes, dtype), Layer(kernels[-1], sizes, dtype)
    expected = whole.run(given_tokens, [StateUse(2, None, ((number, 1),))], [0], [number])
    stops = sorted({*(rng.randint(1, number) for _ in range(3)), number})
    for start, stop in itertools.pairwise((0, *stops)):
        # Another request is computed beside it.
        beside = tokens(sizes, 2, seed + stop, dtype)
        one = given_tokens[start:stop]
        both = Tokens(
            *(
                torch.cat(pair)
                for pair in ((beside.mixed, one.mixed), (beside.decay, one.decay), (beside.beta, one.beta))
            )
        )
        uses = [StateUse(4, None, ()), StateUse(2, None, ((number, 1),) if stop == number else ())]
        found = cut.run(both, uses, [7, start], [2, stop - start])
        assert torch.equal(found[2:], expected[start:stop])
    for state in (2, NUM_SLOTS + 1):
        assert torch.equal(cut.pool.matrices[state], whole.pool.matrices[state])
        assert torch.equal(cut.pool.windows[state], whole.pool.windows[state])
