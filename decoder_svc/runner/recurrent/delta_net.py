"""Gated delta net layers (arXiv:2412.06464) on the sequences of a step, in place of the modules' own `forward`.

Projections run on all tokens of the step at once. A kernel of the device then computes all tokens, each sequence from
its own state. Where there is none, chunks of prompts run one by one through transformers' chunked form, and single
tokens all together through its recurrent form.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from decoder_svc.runner.attention import AttentionMetadata, current_step
from decoder_svc.runner.recurrent.state_pools import LayerState, StatePool, StateShape
from decoder_svc.runner.state_step import StateStep
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.kernels.activation import Activation, activation_of


class DeltaStep(Protocol):
    """A kernel for the new tokens of several sequences."""

    def can_compute(self, key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
        """Whether it computes heads of this size, from inputs of this type."""
        ...

    def __call__(
        self,
        mixed: Tensor,
        pool: StatePool,
        filters: Tensor,
        decay: Tensor,
        beta: Tensor,
        step: StateStep,
        num_key_heads: int,
    ) -> Tensor:
        """Changes the states in the pool. Returns outputs `[num_tokens, value_heads, value_dim]`, float32.

        `mixed` has the queries, keys and values of all heads in front of the convolution, `[num_tokens, channels]`.
        `filters` is `[kernel_size, channels]`; `decay`, natural logarithms, and `beta` are `[num_tokens, value_heads]`.
        """
        ...  # fmt: skip


def _can_compute(step: DeltaStep, module: Any, dtype: torch.dtype) -> bool:
    """Whether a kernel computes a module: it knows no bias of the convolution, and one activation."""
    is_known = module.conv1d.bias is None and activation_of(ACT2FN[module.activation]) is Activation.SILU
    return is_known and step.can_compute(module.head_k_dim, module.head_v_dim, dtype)


class DeltaNet:
    """One layer: computes what its module's `forward` would, from the states in a pool."""

    def __init__(self, module: Any, dtype: torch.dtype, step: DeltaStep | None) -> None:
        """`step` computes the tokens where it can; otherwise transformers' functions do."""
        self._module = module
        self.pool = StatePool(
            StateShape(
                matrix=(module.num_v_heads, module.head_k_dim, module.head_v_dim),
                window=(module.conv_dim, module.conv_kernel_size - 1),
                dtype=dtype,
            )
        )
        self._kernel = step if step is not None and _can_compute(step, module, dtype) else None
        # [kernel_size, channels]
        self._filters = module.conv1d.weight[:, 0].T.float().contiguous()
        home = sys.modules[type(module).__module__]
        # Without the kernels of other packages, which transformers would use if they are installed.
        self._chunked: Callable[..., Any] = inspect.unwrap(home.torch_chunk_gated_delta_rule)
        self._recurrent: Callable[..., Any] = inspect.unwrap(home.torch_recurrent_gated_delta_rule)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel computes the layer, which reads no tensor on the host."""
        return self._kernel is not None

    def __call__(self, hidden_states: Tensor, **_arguments: Any) -> Tensor:
        """Takes and returns `[1, num_tokens, hidden_size]`."""
        module = self._module
        _, metadata = current_step()
        mixed = module.in_proj_qkv(hidden_states)[0]
        gate = module.in_proj_z(hidden_states)[0].unflatten(-1, (-1, module.head_v_dim))
        beta = module.in_proj_b(hidden_states)[0].sigmoid()
        decay = -module.A_log.float().exp() * F.softplus(module.in_proj_a(hidden_states)[0].float() + module.dt_bias)
        if self._kernel is not None:
            assert metadata.state_step is not None, "the runner gives it for a model with recurrent layers"
            attended = self._kernel(
                mixed, self.pool, self._filters, decay, beta, metadata.state_step, module.num_k_heads
            ).to(gate.dtype)
        else:
            attended = torch.empty_like(gate)
            self._single_tokens(metadata, mixed, beta, decay, attended)
            self._chunks(metadata, mixed, beta, decay, attended)
        normed = module.norm(attended.flatten(0, 1), gate.flatten(0, 1))
        output: Tensor = module.out_proj(normed.view(1, len(mixed), -1))
        return output

    def _single_tokens(
        self, metadata: AttentionMetadata, mixed: Tensor, beta: Tensor, decay: Tensor, attended: Tensor
    ) -> None:
        """Computes all sequences with one new token in a step."""
        rows, uses, starts, begin = [], [], [], 0
        for use, length, kv_len in zip(metadata.states, metadata.query_lens, metadata.kv_lens, strict=True):
            if length == 1:
                rows.append(begin)
                uses.append(use)
                starts.append(kv_len - 1)
            begin += length
        if not rows:
            return
        tokens = torch.tensor(rows, device=mixed.device)
        inputs = torch.cat([self.pool.read_windows(uses, starts), mixed[tokens, :, None]], dim=-1)
        # Summed up here: the result of PyTorch's convolution may depend on the number of sequences.
        products = inputs.float() * self._module.conv1d.weight[:, 0].float()
        convolved = products.sum(-1).to(mixed.dtype)
        matrices = self.pool.read_matrices(uses, starts)
        output, after = self._rule(
            self._recurrent, convolved[:, None], beta[tokens][:, None], decay[tokens][:, None], matrices
        )
        self.pool.write_matrices(uses, after)
        attended[tokens] = output[:, 0].to(attended.dtype)
        self.pool.write_windows(uses, inputs[:, :, 1:])
        for use in uses:
            for _, snapshot in use.taken:
                self.pool.take_snapshot(use, snapshot)

    def _chunks(
        self, metadata: AttentionMetadata, mixed: Tensor, beta: Tensor, decay: Tensor, attended: Tensor
    ) -> None:
        """Computes the sequences with several new tokens, one by one."""
        begin = 0
        for use, length, kv_len in zip(metadata.states, metadata.query_lens, metadata.kv_lens, strict=True):
            if length > 1:
                part = slice(begin, begin + length)
                attended[part] = self._chunk(use, kv_len - length, mixed[part], beta[part], decay[part])
            begin += length

    def _chunk(self, use: StateUse, start: int, mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """Computes one sequence, piece by piece up to each snapshot; returns `[num_tokens, heads, value_dim]`."""
        state = self.pool.read([use], [start])
        weight = self._module.conv1d.weight
        # [1, channels, kernel_size - 1 + num_tokens]
        inputs = torch.cat([state.windows, mixed.T[None]], dim=-1)
        convolved = F.conv1d(inputs, weight, groups=len(weight))[0].T
        num_kept = state.windows.shape[-1]
        snapshots: dict[int, list[int]] = {}
        for num_seen, snapshot in use.taken:
            snapshots.setdefault(num_seen - start, []).append(snapshot)
        stops = sorted({*snapshots, len(mixed)})
        outputs = []
        for first, stop in zip((0, *stops), stops, strict=False):
            piece = slice(first, stop)
            rule = self._recurrent if stop - first == 1 else self._chunked
            output, matrices = self._rule(
                rule, convolved[None, piece], beta[None, piece], decay[None, piece], state.matrices
            )
            outputs.append(output[0])
            state = LayerState(matrices, inputs[:, :, stop : stop + num_kept])
            for snapshot in snapshots.get(stop, ()):
                self.pool.write_snapshot(snapshot, state)
        self.pool.write([use], state)
        return torch.cat(outputs)

    def _rule(
        self, rule: Callable[..., Any], convolved: Tensor, beta: Tensor, decay: Tensor, matrices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Applies a form of the gated delta rule to `[num_sequences, num_tokens, channels]`, from states."""
        module = self._module
        sizes = (module.key_dim, module.key_dim, module.value_dim)
        query, key, value = ACT2FN[module.activation](convolved).split(sizes, dim=-1)
        output, after = rule(
            query.unflatten(-1, (-1, module.head_k_dim)),
            key.unflatten(-1, (-1, module.head_k_dim)),
            value.unflatten(-1, (-1, module.head_v_dim)),
            g=decay,
            beta=beta,
            initial_state=matrices,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return output, after
