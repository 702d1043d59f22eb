"""Random Mamba2 layers and steps of them, and the recurrence in float64 that they are compared with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from decoder_svc.runner.attention import SdpaBackend, forward_context
from decoder_svc.runner.recurrent.mamba2 import Mamba2, ScanStep
from decoder_svc.runner.recurrent.recurrent_layers import lone_step
from decoder_svc.runner.state_step import PoolSizes
from decoder_svc.scheduling.scheduler_output import StateUse

HIDDEN_SIZE = 24
POOL = PoolSizes(num_slots=5, num_snapshots=6)


@dataclass(frozen=True)
class Sizes:
    """The numbers that make up the shape of a layer."""

    num_groups: int = 2
    heads_per_group: int = 2
    head_dim: int = 48
    state_size: int = 12
    num_taps: int = 4
    has_bias: bool = True
    time_step_min: float = 0.0


SIZES = st.builds(
    Sizes,
    num_groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 10),
    head_dim=st.integers(1, 9).map(lambda number: 16 * number),
    state_size=st.integers(1, 40),
    num_taps=st.integers(1, 5),
    has_bias=st.booleans(),
)


def module(sizes: Sizes, dtype: torch.dtype = torch.float32) -> Any:
    """Returns transformers' module with random weights, whose time steps are between 0.0001 and 3."""
    torch.manual_seed(3)
    num_heads = sizes.num_groups * sizes.heads_per_group
    config = NemotronHConfig(
        hidden_size=HIDDEN_SIZE,
        layers_block_type=["linear_attention"],
        n_groups=sizes.num_groups,
        mamba_num_heads=num_heads,
        mamba_head_dim=sizes.head_dim,
        ssm_state_size=sizes.state_size,
        conv_kernel=sizes.num_taps,
        use_conv_bias=sizes.has_bias,
        chunk_size=8,
        time_step_min=sizes.time_step_min,
    )
    mixer = NemotronHMamba2Mixer(config, 0).requires_grad_(requires_grad=False)
    mixer.A_log.copy_(torch.log(0.02 + 3 * torch.rand(num_heads)))
    mixer.D.copy_(torch.randn(num_heads))
    mixer.dt_bias.copy_(3 * torch.randn(num_heads) - 2)
    mixer.norm.weight.copy_(1 + 0.2 * torch.randn(mixer.norm.weight.shape))
    return mixer.to(dtype)


def layer_of(mixer: Any, kernel: ScanStep | None, dtype: torch.dtype = torch.float32) -> Mamba2:
    layer = Mamba2(mixer, dtype, kernel)
    assert layer.has_kernel == (kernel is not None)
    layer.pool.allocate(POOL, torch.device("cpu"))
    return layer


def computed(layer: Mamba2, parts: Sequence[tuple[StateUse, int, Tensor]]) -> list[Tensor]:
    """Computes one step: for each sequence its states, its first new token, and the new tokens' hidden states."""
    uses, starts, tokens = zip(*parts, strict=True)
    lengths = [len(each) for each in tokens]
    metadata = lone_step(uses, starts, lengths, POOL, lambda numbers: numbers)
    with torch.inference_mode(), forward_context(SdpaBackend(), metadata):
        output = layer(torch.cat(tokens)[None])
    return list(output[0].split(lengths))


def recurrence(mixer: Any, hidden: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Returns a sequence's outputs, its states after each token, and all inputs of the convolution, in float64."""
    projected = F.linear(hidden.double(), mixer.in_proj.weight.double())
    gate, mixed, time_steps = projected.split((mixer.intermediate_size, mixer.conv_dim, mixer.num_heads), dim=-1)
    inputs = F.pad(mixed, (0, 0, mixer.conv_kernel_size - 1, 0))
    bias = None if mixer.conv1d.bias is None else mixer.conv1d.bias.double()
    convolved = F.silu(F.conv1d(inputs.T, mixer.conv1d.weight.double(), bias, groups=mixer.conv_dim).T)
    size = mixer.n_groups * mixer.ssm_state_size
    values, keys, queries = convolved.split((mixer.intermediate_size, size, size), dim=-1)
    state = torch.zeros(mixer.num_heads, mixer.ssm_state_size, mixer.head_dim, dtype=torch.float64)
    outputs, states = [], []
    for value, key, query, raw in zip(values, keys, queries, time_steps, strict=True):
        step = torch.log1p((raw + mixer.dt_bias.double()).exp())
        x = value.view(mixer.num_heads, mixer.head_dim)
        per_group = mixer.num_heads // mixer.n_groups
        b, c = (each.view(mixer.n_groups, -1).repeat_interleave(per_group, 0) for each in (key, query))
        kept = (-step * mixer.A_log.double().exp()).exp()
        state = kept[:, None, None] * state + b[:, :, None] * (step[:, None] * x)[:, None]
        states.append(state)
        outputs.append((state * c[:, :, None]).sum(1) + mixer.D.double()[:, None] * x)
    gated = (torch.stack(outputs).flatten(1) * F.silu(gate)).unflatten(-1, (mixer.n_groups, -1))
    normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + mixer.norm.variance_epsilon)
    scaled = normed.flatten(1) * mixer.norm.weight.double()
    return F.linear(scaled, mixer.out_proj.weight.double()), states, inputs


def check_divisions(kernel: ScanStep | None, sizes: Sizes, seed: int) -> None:
    """Compares sequences that are divided and batched at random with the recurrence of each as a whole."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    mixer = module(sizes)
    layer = layer_of(mixer, kernel)
    wholes = [torch.randn(rng.randint(1, 25), HIDDEN_SIZE, generator=generator) for _ in range(3)]
    slots = rng.sample(range(POOL.num_slots), len(wholes))
    expected = [recurrence(mixer, whole) for whole in wholes]
    done, found = [0] * len(wholes), [[torch.empty(0, HIDDEN_SIZE)] for _ in wholes]
    untouched = next(slot for slot in range(POOL.num_slots) if slot not in slots)
    layer.pool.matrices[untouched] = 7.0
    while any(count < len(whole) for count, whole in zip(done, wholes, strict=True)):
        parts, indexes, free = [], [], [*range(POOL.num_snapshots)]
        for index, whole in enumerate(wholes):
            start = done[index]
            length = min(rng.choice((0, 1, 1, 4, 9)), len(whole) - start)
            if not length:
                continue
            taken = [(start + rng.randint(1, length), free.pop()) for _ in range(rng.choice((0, 1, 2)))]
            indexes.append((index, taken))
            parts.append((StateUse(slots[index], None, tuple(taken)), start, whole[start : start + length]))
        if not parts:
            continue
        for (index, taken), output in zip(indexes, computed(layer, parts), strict=True):
            found[index].append(output)
            done[index] += len(output)
            _, states, inputs = expected[index]
            for seen, state in [(done[index], slots[index]), *((n, POOL.num_slots + to) for n, to in taken)]:
                matrix, window = layer.pool.matrices[state], layer.pool.windows[state]
                torch.testing.assert_close(matrix.double(), states[seen - 1], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(
                    window.double(), inputs[seen : seen + sizes.num_taps - 1].T, rtol=1e-5, atol=1e-5
                )
    for (wanted, *_), pieces in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.cat(pieces).double(), wanted, rtol=1e-3, atol=1e-4)
    assert bool((layer.pool.matrices[untouched] == 7.0).all()), "other requests stay"


def check_cuts(kernels: Sequence[ScanStep], sizes: Sizes, seed: int, dtype: torch.dtype) -> None:
    """Compares the bits of a prompt's tokens, computed at once by the first kernel, and in pieces by the last one."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    mixer = module(sizes, dtype)
    number = rng.randint(1, 14)
    # Rows of them lie in one projection.
    widths = (mixer.intermediate_size, mixer.conv_dim, mixer.num_heads)
    projected = torch.randn(number + 30, sum(widths), generator=generator).to(dtype)
    whole, cut = (layer_of(mixer, kernel, dtype) for kernel in (kernels[0], kernels[-1]))
    for states in (whole.pool, cut.pool):
        states.matrices[3], states.windows[3] = 0.5, 0.25

    def run(layer: Mamba2, rows: list[int], uses: list[StateUse], starts: list[int], lengths: list[int]) -> Tensor:
        step = lone_step(uses, starts, lengths, POOL, lambda numbers: numbers).state_step
        assert step is not None
        assert layer._kernel is not None
        gates, mixed, time_steps = projected[rows].split(widths, dim=-1)
        return layer._kernel(mixed, time_steps, gates, layer.pool, layer._weights, step)

    # Zeros, or the state of a snapshot, are what the sequence begins with.
    begin = rng.choice((None, 3 - POOL.num_slots))
    start = 0 if begin is None else 8
    if begin is not None:
        whole.pool.matrices[2], whole.pool.windows[2] = 0.5, 0.25
        cut.pool.matrices[2], cut.pool.windows[2] = 0.5, 0.25
    last = ((start + number, 1),)
    expected = run(whole, [*range(number)], [StateUse(2, None, last)], [start], [number])
    stops = sorted({*(rng.randint(1, number) for _ in range(3)), number})
    for first, stop in itertools.pairwise((0, *stops)):
        # Another request is computed beside it.
        rows = [number + stop, number + stop + 1, *range(first, stop)]
        uses = [StateUse(4, None, ()), StateUse(2, None, last if stop == number else ())]
        found = run(cut, rows, uses, [7, start + first], [2, stop - first])
        assert torch.equal(found[2:], expected[first:stop])
    for state in (2, POOL.num_slots + 1):
        assert torch.equal(cut.pool.matrices[state], whole.pool.matrices[state])
        assert torch.equal(cut.pool.windows[state], whole.pool.windows[state])


def check_snapshots(kernel: ScanStep | None, seed: int) -> None:
    """Compares a sequence that begins with a snapshot of another one with what the other computed behind it."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layer = layer_of(module(Sizes()), kernel)
    number = rng.randint(2, 20)
    whole = torch.randn(number, HIDDEN_SIZE, generator=generator)
    seen = rng.randint(1, number - 1)
    (expected,) = computed(layer, [(StateUse(0, None, ((seen, 4),)), 0, whole)])
    (found,) = computed(layer, [(StateUse(2, 4, ()), seen, whole[seen:])])
    torch.testing.assert_close(found, expected[seen:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.pool.matrices[2], layer.pool.matrices[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.pool.windows[2], layer.pool.windows[0], rtol=1e-5, atol=1e-5)


def check_module(kernel: ScanStep | None, seed: int) -> None:
    """Compares a whole prompt with transformers' module, in which no limit of time steps is reached."""
    mixer = module(Sizes(has_bias=seed != 1))
    whole = torch.randn(21, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))
    (found,) = computed(layer_of(mixer, kernel), [(StateUse(1, None, ()), 0, whole)])
    torch.testing.assert_close(found, mixer(whole[None])[0], rtol=1e-4, atol=1e-5)


def check_small_time_steps(kernel: ScanStep | None) -> None:
    """Checks that time steps below the limit are not clamped in prompts either.

    transformers clamps those of a prompt, so its own answer depends on where the prompt ends.
    """
    mixer = module(Sizes(time_step_min=0.5))
    whole = torch.randn(9, HIDDEN_SIZE, generator=torch.Generator().manual_seed(5))
    layer = layer_of(mixer, kernel)
    (at_once,) = computed(layer, [(StateUse(1, None, ()), 0, whole)])
    one_by_one = [computed(layer, [(StateUse(2, None, ()), t, whole[t : t + 1])])[0] for t in range(len(whole))]
    torch.testing.assert_close(torch.cat(one_by_one), at_once, rtol=1e-4, atol=1e-5)
    expected, *_ = recurrence(mixer, whole)
    torch.testing.assert_close(at_once.double(), expected, rtol=1e-3, atol=1e-4)
    cache = DynamicCache(config=mixer.config)
    pieces = [mixer(whole[None, :4], cache_params=cache), mixer(whole[None, 4:5], cache_params=cache)]
    of_transformers = torch.cat(pieces, dim=1)[0], mixer(whole[None])[0, :5]
    assert (of_transformers[0] - of_transformers[1]).abs().max() > 1e-2
    assert (at_once - mixer(whole[None])[0]).abs().max() > 1e-2
