"""The inputs of a step on its device, and its attention metadata, from flattened inputs or the tensors of a graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata
from decoder_svc.runner.input_batch import BlockInputs, FlatInputs
from decoder_svc.runner.paged_step import Move, PagedBlocks, PagedStep, paged_step
from decoder_svc.runner.state_step import StateStep


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """The inputs of a step, on the device where it runs."""

    flat: FlatInputs
    # Rotary positions, [num_axes, num_tokens].
    positions: Tensor
    metadata: AttentionMetadata
    # Ids, [num_tokens].
    token_ids: Tensor
    # Indexes of the tokens whose logits are computed, [num_sampled].
    sampled_indexes: Tensor


@dataclass(frozen=True, slots=True)
class Embedded:
    """The input embeddings of a step, rows of images included."""

    # [num_tokens, hidden_size].
    tokens: Tensor
    # One tensor per further feature level, same shape; only tokens of images have values there.
    levels: tuple[Tensor, ...]
    # Indexes of the tokens that are replaced by an image's row.
    row_indexes: list[int]


def step_metadata(
    flat: FlatInputs,
    move: Move,
    *,
    reads_tensors: bool,
    is_mutual_beyond_window: bool,
    state_step: StateStep | None = None,
) -> AttentionMetadata:
    """Returns the metadata of any step. `reads_tensors` is the backend's."""
    paged = paged_step(flat, move, is_mutual_beyond_window=is_mutual_beyond_window) if reads_tensors else None
    return AttentionMetadata(
        full=_block_metadata(flat.full, move, None if paged is None else paged.full),
        sliding=None
        if flat.sliding is None
        else _block_metadata(flat.sliding, move, None if paged is None else paged.sliding),
        query_lens=flat.query_lens,
        kv_lens=flat.kv_lens,
        mutual_spans=flat.mutual_spans,
        is_mutual_beyond_window=is_mutual_beyond_window,
        paged=paged,
        states=flat.states,
        state_step=state_step,
    )


def recorded_metadata(step: PagedStep) -> AttentionMetadata:
    """Returns the metadata of a step inside a graph.

    Only tensors may be read: a graph is replayed for other steps, to which the recorded Python numbers do not apply.
    """
    sliding = None if step.sliding is None else BlockMetadata(step.sliding.slot_mapping, (), ())
    return AttentionMetadata(
        full=BlockMetadata(step.full.slot_mapping, (), ()),
        sliding=sliding,
        query_lens=(),
        kv_lens=(),
        mutual_spans=(),
        is_mutual_beyond_window=step.mutual is not None and step.mutual.is_beyond_window,
        paged=step,
        state_step=step.states,
    )


def _block_metadata(inputs: BlockInputs, move: Move, paged: PagedBlocks | None) -> BlockMetadata:
    """`paged` has the same slots on the device already; a backend that reads it needs no block tables here."""
    if paged is not None:
        return BlockMetadata(paged.slot_mapping, (), inputs.first_tokens)
    return BlockMetadata(
        slot_mapping=move(torch.from_numpy(inputs.slot_mapping)),
        block_tables=tuple(move(torch.from_numpy(table)) for table in inputs.block_tables),
        first_keys=inputs.first_tokens,
    )
