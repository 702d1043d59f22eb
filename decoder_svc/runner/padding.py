"""Pads a step with tokens that belong to no request, for devices whose steps must have certain numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from decoder_svc.runner.input_batch import BlockInputs, FlatInputs


def padded_inputs(flat: FlatInputs, num_tokens: int, *, block_size: int, unread_blocks: tuple[int, int]) -> FlatInputs:
    """Returns the step with `num_tokens` tokens, at least as many as it has; the same object if it has them already.

    Padding follows the step's own tokens, as sequences that see only themselves. Their keys and values go to the block
    that nobody reads: `unread_blocks` has its index in the full and in the sliding group. They are neither sampled nor
    part of a request, so nothing reads their results. None is longer than the longest sequence of the step, so a step
    of single tokens stays one. Raises ValueError if the step has more tokens than `num_tokens`.
    """
    num_missing = num_tokens - len(flat.token_ids)
    if num_missing < 0:
        raise ValueError(f"a step of {len(flat.token_ids)} tokens cannot be padded to {num_tokens}")
    if num_missing == 0:
        return flat
    longest = max(flat.query_lens)
    whole, rest = divmod(num_missing, longest)
    lengths = (longest,) * whole + (rest,) * (rest > 0)
    full, sliding = unread_blocks
    return replace(
        flat,
        token_ids=np.pad(flat.token_ids, (0, num_missing)),
        positions=np.pad(flat.positions, ((0, 0), (0, num_missing))),
        full=_padded_blocks(flat.full, lengths, block_size, full),
        sliding=None if flat.sliding is None else _padded_blocks(flat.sliding, lengths, block_size, sliding),
        query_lens=flat.query_lens + lengths,
        kv_lens=flat.kv_lens + lengths,
        mutual_spans=flat.mutual_spans + ((),) * len(lengths),
    )


def _padded_blocks(inputs: BlockInputs, lengths: Sequence[int], block_size: int, unread_block: int) -> BlockInputs:
    """Adds sequences of these lengths whose tokens are all in one block; a long one is there several times over."""
    slots = [unread_block * block_size + np.arange(length) % block_size for length in lengths]
    tables = tuple(np.full(-(-length // block_size), unread_block) for length in lengths)
    return BlockInputs(
        slot_mapping=np.concatenate([inputs.slot_mapping, *slots]),
        block_tables=inputs.block_tables + tables,
        first_tokens=inputs.first_tokens + (0,) * len(lengths),
    )
