"""Recurrent layers in Triton: short convolutions, gated delta nets (arXiv:2412.06464) and Mamba2 (arXiv:2405.21060).

Delta nets and Mamba2 layers are computed in their recurrent form, token by token.

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

from decoder_svc.runner.recurrent.mamba2 import ScanWeights
from decoder_svc.runner.recurrent.state_pools import StatePool
from decoder_svc.runner.state_step import StateStep

# Tokens and channels of a convolution that one program computes.
_BLOCK_TOKENS, _BLOCK_CHANNELS = 8, 128
# Columns of a head's matrix that one program holds in the registers of one warp: sums need no barrier then.
BLOCK_COLUMNS, NUM_WARPS = 8, 1
# Rows of a head's matrix that fit into these registers.
_MOST_ROWS = 256
# Filters are unrolled.
_MOST_TAPS = 16


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(
    inputs, windows, filters, bias, outputs, sources, first_tokens, token_sequences, num_tokens,
    ROW: tl.constexpr, NUM_CHANNELS: tl.constexpr, NUM_KEPT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
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
        new = tl.load(inputs + places[:, None] * ROW + channels[None, :], mask=is_inside & is_new[:, None], other=0.0)
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
    ROW: tl.constexpr, NUM_CHANNELS: tl.constexpr, NUM_KEPT: tl.constexpr, PADDED_KEPT: tl.constexpr,
):  # fmt: skip
    """Writes the last inputs before token `stop` of a sequence to a state, in some channels."""
    kept = tl.arange(0, PADDED_KEPT)
    places = stop - NUM_KEPT + kept
    is_inside = (kept < NUM_KEPT)[:, None] & is_channel[None, :]
    is_new, is_old = places >= begin, (places < begin) & (source >= 0)
    new = tl.load(inputs + places[:, None] * ROW + channels[None, :], mask=is_inside & is_new[:, None], other=0.0)
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
    ROW: tl.constexpr, NUM_CHANNELS: tl.constexpr, NUM_KEPT: tl.constexpr, PADDED_KEPT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
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
                tl.load(snapshot_states + snapshot), channels, is_channel, ROW, NUM_CHANNELS, NUM_KEPT,
                PADDED_KEPT,
            )  # fmt: skip
        # The state that the sequence leaves is often the one that it began with, so it is written last.
        _store_window(
            inputs, windows, stop, begin, source, tl.load(targets + sequence), channels, is_channel,
            ROW, NUM_CHANNELS, NUM_KEPT, PADDED_KEPT,
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


@triton.jit
def _softplus(number):
    """Returns log(1 + exp(number)), with all of its digits where it is small."""
    power = tl.exp(-tl.abs(number))
    # log(1 + p) = 2 artanh(p / (2 + p)), by its series: a device's logarithms have no relative precision near 1. The
    # first term that is left out is 1.4e-8 of the sum at most.
    ratio = power / (2.0 + power)
    square = ratio * ratio
    series = square * (1 / 9 + square * (1 / 11 + square * (1 / 13)))
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + series)))
    return tl.maximum(number, 0.0) + 2.0 * ratio * series


@triton.jit
def _scan(
    convolved, time_steps, gates, rates, skips, step_bias, matrices, outputs,
    sources, targets, first_tokens, first_snapshots, snapshot_tokens, snapshot_states,
    STEPS_ROW: tl.constexpr, GATES_ROW: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr,
    STATE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_STATE: tl.constexpr, NUM_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes some columns of a Mamba2 head for all tokens of a sequence. Grid: sequences, heads, column blocks."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, PADDED_STATE), tl.program_id(2) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    is_row, is_column = rows < STATE_SIZE, columns < HEAD_DIM
    is_inside = is_row[:, None] & is_column[None, :]
    begin, stop = tl.load(first_tokens + sequence), tl.load(first_tokens + sequence + 1)
    if begin < stop:
        VALUES: tl.constexpr = NUM_HEADS * HEAD_DIM
        KEYS: tl.constexpr = NUM_GROUPS * STATE_SIZE
        own_values = head * HEAD_DIM + columns
        own_keys = VALUES + head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE + rows
        places = (head * STATE_SIZE + rows)[:, None] * HEAD_DIM + columns[None, :]
        STATE: tl.constexpr = STATE_SIZE * VALUES
        rate, skip, bias = tl.load(rates + head), tl.load(skips + head), tl.load(step_bias + head)
        source = tl.load(sources + sequence)
        state = tl.load(matrices + source * STATE + places, mask=is_inside & (source >= 0), other=0.0)
        first, last = tl.load(first_snapshots + sequence), tl.load(first_snapshots + sequence + 1)
        begun = begin
        # The tokens up to each snapshot, and then those behind the last one.
        for snapshot in range(first, last + 1):
            is_snapshot = snapshot < last
            end = tl.where(is_snapshot, begin + tl.load(snapshot_tokens + snapshot, mask=is_snapshot, other=0), stop)
            for token in range(begun, end):
                channels = convolved + token * (VALUES + 2 * KEYS)
                value = tl.load(channels + own_values, mask=is_column, other=0.0)
                key = tl.load(channels + own_keys, mask=is_row, other=0.0)
                query = tl.load(channels + KEYS + own_keys, mask=is_row, other=0.0)
                gate = tl.load(gates + token * GATES_ROW + own_values, mask=is_column, other=0.0).to(tl.float32)
                time_step = _softplus(tl.load(time_steps + token * STEPS_ROW + head).to(tl.float32) + bias)
                state = state * tl.exp(time_step * rate) + key[:, None] * (value * time_step)[None, :]
                output = tl.sum(state * query[:, None], 0) + skip * value
                output *= gate / (1.0 + tl.exp(-gate))
                tl.store(outputs + token * VALUES + own_values, output, mask=is_column)
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

    `inputs` are `[num_tokens, channels]`, and their rows may be apart in memory. `has_silu` applies SiLU to the
    outputs, which are of type `dtype` if given.
    """
    assert inputs.stride(1) == 1, "channels are beside each other"
    num_tokens, num_channels = inputs.shape
    num_kept = len(filters) - 1
    num_blocks = triton.cdiv(num_channels, _BLOCK_CHANNELS)
    outputs = torch.empty((num_tokens, num_channels), dtype=dtype or inputs.dtype, device=inputs.device)
    _convolve[(triton.cdiv(num_tokens, _BLOCK_TOKENS), num_blocks)](
        inputs, pool.windows, filters, filters if bias is None else bias, outputs,
        step.sources, step.first_tokens, step.token_sequences, num_tokens,
        ROW=inputs.stride(0), NUM_CHANNELS=num_channels, NUM_KEPT=num_kept, HAS_BIAS=bias is not None,
        HAS_SILU=has_silu, BLOCK_TOKENS=_BLOCK_TOKENS, BLOCK_CHANNELS=_BLOCK_CHANNELS,
    )  # fmt: skip
    if num_kept:
        _leave_windows[(len(step.targets), num_blocks)](
            inputs, pool.windows, step.sources, step.targets, step.first_tokens,
            step.first_snapshots, step.snapshot_tokens, step.snapshot_states,
            ROW=inputs.stride(0), NUM_CHANNELS=num_channels, NUM_KEPT=num_kept,
            PADDED_KEPT=triton.next_power_of_2(num_kept), BLOCK_CHANNELS=_BLOCK_CHANNELS,
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
        return 0 < key_dim <= _MOST_ROWS and value_dim > 0 and dtype.is_floating_point

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


class TritonScanStep:
    """Computes the new tokens of all sequences of a step (`ScanStep`)."""

    def can_compute(self, head_dim: int, state_size: int, kernel_size: int, dtype: torch.dtype) -> bool:
        """Whether a block of columns fits into a program's registers, and filters can be unrolled."""
        has_size = head_dim > 0 and 0 < state_size <= _MOST_ROWS and 0 < kernel_size <= _MOST_TAPS
        return has_size and dtype.is_floating_point

    def __call__(
        self, mixed: Tensor, time_steps: Tensor, gates: Tensor, pool: StatePool, weights: ScanWeights, step: StateStep
    ) -> Tensor:
        """Implements `ScanStep.__call__` with three kernels."""
        assert time_steps.stride(1) == gates.stride(1) == 1, "numbers of a token are beside each other"
        _, num_heads, state_size, head_dim = pool.matrices.shape
        convolved = convolve(
            mixed, pool, weights.filters, weights.bias, step, has_silu=True, dtype=torch.float32
        )  # fmt: skip
        outputs = torch.empty((len(mixed), num_heads, head_dim), dtype=torch.float32, device=mixed.device)
        block = min(BLOCK_COLUMNS, triton.next_power_of_2(head_dim))
        _scan[(len(step.targets), num_heads, triton.cdiv(head_dim, block))](
            convolved, time_steps, gates, weights.rates, weights.skips, weights.step_bias, pool.matrices, outputs,
            step.sources, step.targets, step.first_tokens,
            step.first_snapshots, step.snapshot_tokens, step.snapshot_states,
            STEPS_ROW=time_steps.stride(0), GATES_ROW=gates.stride(0), NUM_GROUPS=weights.num_groups,
            NUM_HEADS=num_heads, STATE_SIZE=state_size, HEAD_DIM=head_dim,
            PADDED_STATE=triton.next_power_of_2(state_size), NUM_COLUMNS=block, num_warps=NUM_WARPS,
        )  # fmt: skip
        return outputs
