"""Mamba2 layers (arXiv:2405.21060) on the sequences of a step, in place of the modules' own `forward`.

A head's state is a matrix. With the time step dt of a token, its value x, key B and query C behind a convolution, and
the head's numbers A < 0 and D,

    state <- exp(dt A) · state + B (dt x);   output = SiLU(gate) (C state + D x)

Time steps are never clamped, neither in prompts nor in single tokens, and all sums are float32 (docs/adr/0057).
Projections run on all tokens of the step at once. A kernel of the device then computes all tokens. Where there is none,
chunks of prompts run one by one through transformers' chunked form, and single tokens all together.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from decoder_svc.runner.attention import current_step
from decoder_svc.runner.recurrent.state_pools import StatePool, StateShape
from decoder_svc.runner.recurrent.window_sums import window_sums
from decoder_svc.runner.state_step import StateStep
from lookonce.model.kernels.activation import Activation, activation_of


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """The weights of a layer between its projections, all float32."""

    # [kernel_size, channels], and [channels] or None.
    filters: Tensor
    bias: Tensor | None
    # A, D, and what is added to the time steps in front of softplus, [heads] each.
    rates: Tensor
    skips: Tensor
    step_bias: Tensor
    # Each group of heads has one key and one query.
    num_groups: int

    @classmethod
    def of(cls, module: Any) -> ScanWeights:
        """Copies the weights of a module of transformers."""
        convolution = module.conv1d
        return cls(
            filters=convolution.weight[:, 0].T.float().contiguous(),
            bias=None if convolution.bias is None else convolution.bias.float().contiguous(),
            rates=-module.A_log.float().exp(),
            skips=module.D.float().contiguous(),
            step_bias=module.dt_bias.float().contiguous(),
            num_groups=module.n_groups,
        )


class ScanStep(Protocol):
    """A kernel for the new tokens of several sequences."""

    def can_compute(self, head_dim: int, state_size: int, kernel_size: int, dtype: torch.dtype) -> bool:
        """Whether it computes heads of this size behind a convolution of this size, from inputs of this type."""
        ...

    def __call__(
        self, mixed: Tensor, time_steps: Tensor, gates: Tensor, pool: StatePool, weights: ScanWeights, step: StateStep
    ) -> Tensor:
        """Changes the states in the pool. Returns outputs `[num_tokens, heads, head_dim]`, float32.

        `mixed` has the values, keys and queries of all heads in front of the convolution, `[num_tokens, channels]`, and
        `time_steps` what the projection gives for them, `[num_tokens, heads]`. `gates` are those of the outputs, in
        front of SiLU, `[num_tokens, heads · head_dim]`. Rows of all three may be apart in memory.
        """
        ...  # fmt: skip


class Mamba2:
    """One layer: computes what its module's `forward` would without limits of time steps, from the states in a pool."""

    def __init__(self, module: Any, dtype: torch.dtype, kernel: ScanStep | None) -> None:
        """`kernel` computes the tokens where it can; otherwise operators of PyTorch and transformers' function do."""
        self._module = module
        self.pool = StatePool(
            StateShape(
                matrix=(module.num_heads, module.ssm_state_size, module.head_dim),
                window=(module.conv_dim, module.conv_kernel_size - 1),
                dtype=dtype,
            )
        )
        self._weights = ScanWeights.of(module)
        is_known = activation_of(ACT2FN[module.activation]) is Activation.SILU
        sizes = module.head_dim, module.ssm_state_size, module.conv_kernel_size
        can_compute = kernel is not None and kernel.can_compute(*sizes, dtype)
        self._kernel = kernel if is_known and can_compute else None
        # Without the kernels of other packages, which transformers would use if they are installed.
        self._chunked: Callable[..., Any] = inspect.unwrap(sys.modules[type(module).__module__].mamba2_chunk_scan)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel computes the layer, which reads no tensor on the host."""
        return self._kernel is not None

    def __call__(self, hidden_states: Tensor, **_arguments: Any) -> Tensor:
        """Takes and returns `[1, num_tokens, hidden_size]`."""
        module = self._module
        _, metadata = current_step()
        assert metadata.state_step is not None, "the runner gives it for a model with recurrent layers"
        sizes = (module.intermediate_size, module.conv_dim, module.num_heads)
        gates, mixed, time_steps = module.in_proj(hidden_states)[0].split(sizes, dim=-1)
        compute = self._operators if self._kernel is None else self._kernel
        gated = compute(mixed, time_steps, gates, self.pool, self._weights, metadata.state_step)
        # The norm of float32 numbers is rounded once, to the type of the projection.
        normed = module.norm(gated.flatten(1))
        output: Tensor = module.out_proj(normed.to(hidden_states.dtype)[None])
        return output

    def _operators(
        self, mixed: Tensor, time_steps: Tensor, gates: Tensor, pool: StatePool, weights: ScanWeights, step: StateStep
    ) -> Tensor:
        """Computes all tokens with operators of PyTorch and transformers' chunked form, as a `ScanStep` would."""
        module = self._module
        convolved = ACT2FN[module.activation](window_sums(mixed, pool, weights.filters, weights.bias, step))
        keys_size = weights.num_groups * module.ssm_state_size
        values, keys, queries = convolved.split((module.intermediate_size, keys_size, keys_size), dim=-1)
        tokens = _Tokens(
            values.unflatten(-1, (module.num_heads, module.head_dim)),
            keys.unflatten(-1, (weights.num_groups, module.ssm_state_size)),
            queries.unflatten(-1, (weights.num_groups, module.ssm_state_size)),
            F.softplus(time_steps.float() + weights.step_bias),
        )
        first_tokens, before = step.first_tokens.tolist(), pool.matrices_before(step)
        spans = [slice(*span) for span in pairwise(first_tokens)]
        singles = [index for index, span in enumerate(spans) if span.stop - span.start == 1]
        output = torch.empty_like(tokens.values)
        if singles:
            rows = torch.tensor([spans[index].start for index in singles], device=mixed.device)
            output[rows], after = _single(tokens[rows], before[singles], weights)
            before[singles] = after
        first_snapshots, seen = step.first_snapshots.tolist(), step.snapshot_tokens.tolist()
        for index, span in enumerate(spans):
            snapshots = range(first_snapshots[index], first_snapshots[index + 1])
            state = before[index]
            if span.stop - span.start == 1:
                for snapshot in snapshots:
                    pool.matrices[step.snapshot_states[snapshot]] = state
            elif span.stop > span.start:
                state, begin = before[index], span.start
                for stop in sorted({span.stop, *(span.start + seen[snapshot] for snapshot in snapshots)}):
                    piece = slice(begin, stop)
                    output[piece], state = self._piece(tokens[piece], state, weights)
                    for snapshot in snapshots:
                        if span.start + seen[snapshot] == stop:
                            pool.matrices[step.snapshot_states[snapshot]] = state
                    begin = stop
            pool.matrices[step.targets[index]] = state
        return output * F.silu(gates.float()).view_as(output)

    def _piece(self, tokens: _Tokens, state: Tensor, weights: ScanWeights) -> tuple[Tensor, Tensor]:
        """Computes tokens that follow each other; returns their outputs and the state behind them."""
        if len(tokens.values) == 1:
            output, after = _single(tokens, state[None], weights)
            return output, after[0]
        output, after = self._chunked(
            tokens.values[None],
            tokens.time_steps[None],
            weights.rates,
            tokens.keys[None],
            tokens.queries[None],
            chunk_size=min(self._module.chunk_size, len(tokens.values)),
            D=weights.skips,
            initial_states=state.transpose(-1, -2)[None],
            return_final_states=True,
        )
        return output[0], after[0].transpose(-1, -2)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The inputs of the scan from several tokens, float32."""

    # [num_tokens, heads, head_dim]
    values: Tensor
    # [num_tokens, groups, state_size]
    keys: Tensor
    queries: Tensor
    # [num_tokens, heads]
    time_steps: Tensor

    def __getitem__(self, part: slice | Tensor) -> _Tokens:
        return _Tokens(self.values[part], self.keys[part], self.queries[part], self.time_steps[part])


def _single(tokens: _Tokens, before: Tensor, weights: ScanWeights) -> tuple[Tensor, Tensor]:
    """Computes one token of each sequence; returns outputs, and states as in the pool."""
    per_group = tokens.values.shape[1] // weights.num_groups
    keys, queries = (each.repeat_interleave(per_group, dim=1)[..., None] for each in (tokens.keys, tokens.queries))
    steps = tokens.time_steps[..., None]
    kept = (tokens.time_steps * weights.rates).exp()[..., None, None]
    after = before * kept + keys * (tokens.values * steps)[:, :, None]
    # Summed up here: the result of a product of matrices may depend on the number of sequences.
    return (after * queries).sum(-2) + tokens.values * weights.skips[:, None], after
