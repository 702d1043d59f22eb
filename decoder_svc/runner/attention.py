"""Paged attention behind one call signature, and its registration with transformers' attention interface.

A model loaded with `attn_implementation=PAGED_ATTENTION` calls `_paged_attention` in every layer with the flattened
batch `[1, heads, num_tokens, head_dim]`; the step's metadata comes through `forward_context`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

PAGED_ATTENTION = "lookonce_paged"


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the KV cache of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return elements * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step lie. Sequences follow each other in the flattened batch."""

    # Slot (block · block_size + offset) of every token's key and value, [num_tokens].
    slot_mapping: Tensor
    # Blocks of each sequence in token order, [num_blocks of it].
    block_tables: tuple[Tensor, ...]
    # New tokens per sequence.
    query_lens: tuple[int, ...]
    # Tokens per sequence including the new ones.
    kv_lens: tuple[int, ...]


class AttentionBackend(Protocol):
    """What a device's attention must offer."""

    # Shown in the log and in metrics.
    name: str

    def allocate(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Key and value pools, one pair per layer."""
        ...

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Writes `key` and `value` `[num_tokens, kv_heads, head_dim]` to their slots, then attends causally.

        `query` is `[num_tokens, heads, head_dim]`, and so is the result. `window` limits the keys to the last ones.
        """
        ...  # fmt: skip


class SdpaBackend:
    """The plain reference for any device: gather a sequence's keys and values, then PyTorch's SDPA."""

    name = "sdpa"

    def __init__(self) -> None:
        self._pools: list[tuple[Tensor, Tensor]] = []

    def allocate(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Pools of `[num_blocks, block_size, kv_heads, head_dim]`."""
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self._pools = [
            (torch.zeros(shape, dtype=spec.dtype, device=device), torch.zeros(shape, dtype=spec.dtype, device=device))
            for _ in range(spec.num_layers)
        ]
        return self._pools

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """See AttentionBackend."""
        key_pool, value_pool = self._pools[layer]
        key_pool.flatten(0, 1).index_copy_(0, metadata.slot_mapping, key)
        value_pool.flatten(0, 1).index_copy_(0, metadata.slot_mapping, value)
        output = torch.empty_like(query)
        start = 0
        for blocks, query_len, kv_len in zip(metadata.block_tables, metadata.query_lens, metadata.kv_lens, strict=True):
            stop = start + query_len
            keys = key_pool[blocks].flatten(0, 1)[:kv_len]
            values = value_pool[blocks].flatten(0, 1)[:kv_len]
            output[start:stop] = _attend(query[start:stop], keys, values, scale, window)
            start = stop
        return output


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of the last `len(query)` tokens of one sequence over all its keys."""
    query_len, kv_len = len(query), len(keys)
    is_causal = query_len == kv_len and query_len > 1 and window is None
    mask = None
    if not is_causal and (query_len > 1 or window is not None):
        mask = _causal_mask(query_len, kv_len, window, query.device)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)


def _causal_mask(query_len: int, kv_len: int, window: int | None, device: torch.device) -> Tensor:
    """`[query_len, kv_len]`, true where a query may look; the queries are the sequence's last tokens."""
    query_positions = torch.arange(kv_len - query_len, kv_len, device=device)[:, None]
    key_positions = torch.arange(kv_len, device=device)[None, :]
    mask = key_positions <= query_positions
    if window is not None:
        mask &= key_positions > query_positions - window
    return mask


# Each engine thread has its own step in hand.
_context = threading.local()


@contextmanager
def forward_context(backend: AttentionBackend, metadata: AttentionMetadata) -> Iterator[None]:
    """Makes backend and metadata known to the attention layers called inside, on this thread."""
    _context.step = (backend, metadata)
    try:
        yield
    finally:
        del _context.step


def _paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: `[1, heads, T, D]` in, `[1, T, heads, D]` out."""
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("soft-capped attention and attention sinks are not served")
    backend, metadata = _context.step
    output = backend.forward(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        metadata,
        scaling,
        sliding_window,
    )
    return output[None], None


AttentionInterface.register(PAGED_ATTENTION, _paged_attention)
