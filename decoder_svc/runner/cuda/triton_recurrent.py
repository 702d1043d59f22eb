"""Recurrent layers in Triton: short convolutions, and gated delta nets in their recurrent form (arXiv:2412.06464).

Kernels find the states of a step's sequences through tensors alone, so a step can be recorded as a graph. A token's
numbers depend neither on the batch nor on how a prompt is cut into chunks: all its sums have one order.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoder_svc.runner.recurrent.state_pools import StatePool
from decoder_svc.runner.state_step import StateStep

# Tokens and channels of a convolution that one program computes.
_BLOCK_TOKENS, _BLOCK_CHANNELS = 8, 128
# Columns of a head's matrix that one program holds in the registers of one warp: sums need no barrier then.
BLOCK_COLUMNS, NUM_WARPS = 8, 1
# Filters are unrolled.
_MOST_TAPS = 16


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(
    inputs, windows, filters, bias, outputs, sources, first_tokens, token_sequences, num_tokens,
    NUM_CHANNELS: tl.constexpr, NUM_KEPT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Convolves some tokens in some channels. Grid: blocks of tokens, blocks of channels."""
    # With many tokens, places of inputs do not fit into 32 bits.
    tokens = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_token, is_channel = tokens < num_tokens, channels < NUM_CHANNELS
    sequences = tl.load(token_sequences + tokens, mask=is_token, other=0)
    starts = tl.load(first_tokens + sequences, mask=is_token, other=0)
    states = tl.load(sources + sequences, mask=is_token, other=-1)
    is_inside = is_token[:, None] & is_channel[None, :]
    sums = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(NUM_KEPT + 1):
        places = tokens - NUM_KEPT + tap
        is_new = places >= starts
        new = tl.load(
            inputs + places[:, None] * NUM_CHANNELS + channels[None, :], mask=is_inside & is_new[:, None], other=0.0
        )
        value = new.to(tl.float32)
        if tap < NUM_KEPT:
            is_old = (places < starts) & (states >= 0)
            old = tl.load(
                windows + (states[:, None] * NUM_CHANNELS + channels[None, :]) * NUM_KEPT
                + (NUM_KEPT + places - starts)[:, None],
                mask=is_inside & is_old[:, None], other=0.0,
            )  # fmt: skip
            value += old.to(tl.float32)
        factor = tl.load(filters + tap * NUM_CHANNELS + channels, mask=is_channel, other=0.0)
        sums += value * factor[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + channels, mask=is_channel, other=0.0)[None, :]
    if HAS_SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    tl.store(
        outputs + tokens[:, None] * NUM_CHANNELS + channels[None, :],
        sums.to(outputs.dtype.element_ty), mask=is_inside,
    )  # fmt: skip


@triton.jit
def _store_window(
    inputs, windows, stop, begin, source, target, channels, is_channel,
    NUM_CHANNELS: tl.constexpr, NUM_KEPT: tl.constexpr, PADDED_KEPT: tl.constexpr,
):  # fmt: skip
    """Writes the last inputs before token `stop` of a sequence to a state, in some channels."""
    kept = tl.arange(0, PADDED_KEPT)
    places = stop - NUM_KEPT + kept
    is_inside = (kept < NUM_KEPT)[:, None] & is_channel[None, :]
    is_new, is_old = places >= begin, (places < begin) & (source >= 0)
    new = tl.load(
        inputs + places[:, None] * NUM_CHANNELS + channels[None, :], mask=is_inside & is_new[:, None], other=0.0
    )
    old = tl.load(
        windows + (source * NUM_CHANNELS + channels)[None, :] * NUM_KEPT + (NUM_KEPT + places - begin)[:, None],
        mask=is_inside & is_old[:, None], other=0.0,
    )  # fmt: skip
    # One of the two is 0.
    tl.store(
        windows + (target * NUM_CHANNELS + channels)[None, :] * NUM_KEPT + kept[:, None], new + old, mask=is_inside
    )


@triton.jit
def _leave_windows(
    inputs, windows, sources, targets, first_tokens, first_snapshots, snapshot_tokens, snapshot_states,
    NUM_CHANNELS: tl.constexpr, NUM_KEPT: tl.constexpr, PADDED_KEPT: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Writes the windows that a sequence leaves, snapshots first. Grid: sequences, blocks of channels."""
    sequence = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channels < NUM_CHANNELS
    begin, stop = tl.load(first_tokens + sequence), tl.load(first_tokens + sequence + 1)
    if begin < stop:
        source = tl.load(sources + sequence)
        for snapshot in range(tl.load(first_snapshots + sequence), tl.load(first_snapshots + sequence + 1)):
            _store_window(
                inputs, windows, begin + tl.load(snapshot_tokens + snapshot), begin, source,
                tl.load(snapshot_states + snapshot), channels, is_channel, NUM_CHANNELS, NUM_KEPT, PADDED_KEPT,
            )  # fmt: skip
        # The state that the sequence leaves is often the one that it began with, so it is written last.
        _store_window(
            inputs, windows, stop, begin, source, tl.load(targets + sequence), channels, is_channel,
            NUM_CHANNELS, NUM_KEPT, PADDED_KEPT,
        )  # fmt: skip


@triton.jit
def _unit(vector):
    """Returns a vector scaled to length 1."""
    return vector / tl.sqrt(tl.sum(vector * vector, 0) + 1e-6)


@triton.jit
def _delta(
    convolved, decay, beta, matrices, outputs,
    sources, targets, first_tokens, first_snapshots, snapshot_tokens, snapshot_states,
    NUM_KEY_HEADS: tl.constexpr, NUM_VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_KEYS: tl.constexpr, NUM_COLUMNS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Computes some columns of a head for all tokens of a sequence. Grid: sequences, heads of values, column blocks."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, PADDED_KEYS), tl.program_id(2) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    is_row, is_column = rows < KEY_DIM, columns < VALUE_DIM
    is_inside = is_row[:, None] & is_column[None, :]
    begin, stop = tl.load(first_tokens + sequence), tl.load(first_tokens + sequence + 1)
    if begin < stop:
        NUM_KEYS: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
        NUM_CHANNELS: tl.constexpr = 2 * NUM_KEYS + NUM_VALUE_HEADS * VALUE_DIM
        own_keys = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS) * KEY_DIM + rows
        own_values = 2 * NUM_KEYS + head * VALUE_DIM + columns
        places = (head * KEY_DIM + rows)[:, None] * VALUE_DIM + columns[None, :]
        STATE: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
        source = tl.load(sources + sequence)
        state = tl.load(matrices + source * STATE + places, mask=is_inside & (source >= 0), other=0.0)
        first, last = tl.load(first_snapshots + sequence), tl.load(first_snapshots + sequence + 1)
        begun = begin
        # The tokens up to each snapshot, and then those behind the last one.
        for snapshot in range(first, last + 1):
            is_snapshot = snapshot < last
            end = tl.where(is_snapshot, begin + tl.load(snapshot_tokens + snapshot, mask=is_snapshot, other=0), stop)
            for token in range(begun, end):
                channels = convolved + token * NUM_CHANNELS
                query = tl.load(channels + own_keys, mask=is_row, other=0.0)
                key = tl.load(channels + NUM_KEYS + own_keys, mask=is_row, other=0.0)
                value = tl.load(channels + own_values, mask=is_column, other=0.0)
                query, key = _unit(query) * SCALE, _unit(key)
                state *= tl.exp(tl.load(decay + token * NUM_VALUE_HEADS + head))
                found = tl.sum(state * key[:, None], 0)
                change = (value - found) * tl.load(beta + token * NUM_VALUE_HEADS + head)
                state += key[:, None] * change[None, :]
                output = tl.sum(state * query[:, None], 0)
                tl.store(outputs + (token * NUM_VALUE_HEADS + head) * VALUE_DIM + columns, output, mask=is_column)
            if is_snapshot:
                target = tl.load(snapshot_states + snapshot)
                tl.store(matrices + target * STATE + places, state, mask=is_inside)
            begun = end
        tl.store(matrices + tl.load(targets + sequence) * STATE + places, state, mask=is_inside)


def convolve(
    inputs: Tensor, pool: StatePool, filters: Tensor, bias: Tensor | None, step: StateStep, *, has_silu: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Changes the windows in the pool. Returns outputs `[num_tokens, channels]`.

    `inputs` are `[num_tokens, channels]`. `has_silu` applies SiLU to the outputs, which are of type `dtype` if given.
    """
    inputs = inputs.contiguous()
    num_tokens, num_channels = inputs.shape
    num_kept = len(filters) - 1
    num_blocks = triton.cdiv(num_channels, _BLOCK_CHANNELS)
    outputs = torch.empty_like(inputs, dtype=dtype or inputs.dtype)
    _convolve[(triton.cdiv(num_tokens, _BLOCK_TOKENS), num_blocks)](
        inputs, pool.windows, filters, filters if bias is None else bias, outputs,
        step.sources, step.first_tokens, step.token_sequences, num_tokens,
        NUM_CHANNELS=num_channels, NUM_KEPT=num_kept, HAS_BIAS=bias is not None, HAS_SILU=has_silu,
        BLOCK_TOKENS=_BLOCK_TOKENS, BLOCK_CHANNELS=_BLOCK_CHANNELS,
    )  # fmt: skip
    if num_kept:
        _leave_windows[(len(step.targets), num_blocks)](
            inputs, pool.windows, step.sources, step.targets, step.first_tokens,
            step.first_snapshots, step.snapshot_tokens, step.snapshot_states,
            NUM_CHANNELS=num_channels, NUM_KEPT=num_kept, PADDED_KEPT=triton.next_power_of_2(num_kept),
            BLOCK_CHANNELS=_BLOCK_CHANNELS,
        )  # fmt: skip
    return outputs


class TritonConvolutionStep:
    """Computes the new tokens of all sequences of a step (`ConvolutionStep`)."""

    def can_compute(self, num_channels: int, kernel_size: int, dtype: torch.dtype) -> bool:
        """Whether there are kernels for filters of this size."""
        return num_channels > 0 and 0 < kernel_size <= _MOST_TAPS and dtype.is_floating_point

    def __call__(self, mixed: Tensor, pool: StatePool, filters: Tensor, bias: Tensor | None, step: StateStep) -> Tensor:
        """Implements `ConvolutionStep.__call__` with two kernels."""
        gate_before, gate_after, values = mixed.chunk(3, dim=-1)
        return gate_after * convolve(gate_before * values, pool, filters, bias, step)


class TritonDeltaStep:
    """Computes the new tokens of all sequences of a step (`DeltaStep`)."""

    def can_compute(self, key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
        """Whether a block of columns fits into a program's registers."""
        return 0 < key_dim <= 256 and value_dim > 0 and dtype.is_floating_point

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
        """Implements `DeltaStep.__call__` with three kernels."""
        _, num_value_heads, key_dim, value_dim = pool.matrices.shape
        convolved = convolve(mixed, pool, filters, None, step, has_silu=True, dtype=torch.float32)
        outputs = torch.empty((len(mixed), num_value_heads, value_dim), dtype=torch.float32, device=mixed.device)
        block = min(BLOCK_COLUMNS, triton.next_power_of_2(value_dim))
        _delta[(len(step.targets), num_value_heads, triton.cdiv(value_dim, block))](
            convolved, decay.float().contiguous(), beta.float().contiguous(), pool.matrices, outputs,
            step.sources, step.targets, step.first_tokens,
            step.first_snapshots, step.snapshot_tokens, step.snapshot_states,
            NUM_KEY_HEADS=num_key_heads, NUM_VALUE_HEADS=num_value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            PADDED_KEYS=triton.next_power_of_2(key_dim), NUM_COLUMNS=block, SCALE=key_dim**-0.5,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        return outputs
