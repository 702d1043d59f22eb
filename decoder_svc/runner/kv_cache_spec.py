"""The shape of a model's KV cache: its layers, their groups, and the bytes of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decoder_svc.scheduling.window import Window
from lookonce.model.text_support import CHUNKED_TYPE, HeadShape, layers_without_keys

# Bytes of the scale of a rounded key or value.
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of a model's KV cache."""

    num_layers: int
    # Heads of a layer in the full group.
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    # Layers of the sliding group; empty when all layers are in the full group.
    sliding_layers: frozenset[int] = frozenset()
    # The window of layers in the sliding group; None without such a group.
    window: Window | None = None
    # Slots that one block takes in a pool; None: one per token.
    block_slots: int | None = None
    # Layers without keys and values: recurrent ones (runner/recurrent), and those that mix no tokens.
    keyless_layers: frozenset[int] = frozenset()
    # Heads of a layer in the sliding group; None: those of the full group.
    sliding_heads: HeadShape | None = None
    # Layers that read the keys and values of another layer in their group, and that layer.
    key_sources: Mapping[int, int] = field(default_factory=dict)
    # Keys and values are codes of 8 bits, with a float32 scale for each head and token.
    is_rounded: bool = False
    # Values of the full group are the first elements of keys, so many of them; see HeadShape.
    value_dim: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of the full group, keys and values."""
        return sum(self._layer_block_bytes(layer) for layer in self._own_layers if layer not in self.sliding_layers)

    @property
    def sliding_block_bytes(self) -> int:
        """Bytes of one block in all layers of the sliding group, keys and values."""
        return sum(self._layer_block_bytes(layer) for layer in self._own_layers if layer in self.sliding_layers)

    def heads(self, layer: int) -> HeadShape:
        """Returns the heads of a layer's keys and values."""
        if layer in self.sliding_layers and self.sliding_heads is not None:
            return self.sliding_heads
        return HeadShape(self.num_kv_heads, self.head_dim, self.value_dim)

    def make_pools(self, pool: Callable[[int], Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns the key and value pools of each layer, made by `pool` from a layer's number.

        A layer that reads another's keys and values has the other's pools. Values that are parts of keys have no pool:
        both of the pair are that of the keys.
        """

        def pair(layer: int) -> tuple[Tensor, Tensor]:
            keys = pool(layer)
            return keys, keys if self.heads(layer).value_dim else pool(layer)

        own = {layer: pair(layer) for layer in range(self.num_layers) if layer not in self.key_sources}
        return [own[self.key_sources.get(layer, layer)] for layer in range(self.num_layers)]

    def num_pool_blocks(self, layer: int, num_blocks: int, num_sliding_blocks: int) -> int:
        """Returns the number of blocks in a layer's pool, given those of both groups."""
        if layer in self.keyless_layers:
            return 0
        return num_sliding_blocks if layer in self.sliding_layers else num_blocks

    @property
    def _own_layers(self) -> list[int]:
        kept = (layer for layer in range(self.num_layers) if layer not in self.keyless_layers)
        return [layer for layer in kept if layer not in self.key_sources]

    def _layer_block_bytes(self, layer: int) -> int:
        heads = self.heads(layer)
        head_bytes = heads.head_dim + SCALE_BYTES if self.is_rounded else heads.head_dim * int(self.dtype.itemsize)
        num_pools = 1 if heads.value_dim else 2
        return num_pools * (self.block_slots or self.block_size) * heads.num_kv_heads * head_bytes


def layers_with_window(text: Any) -> frozenset[int]:
    """Returns the layers of the sliding group: those with a window, beside others with keys and values and without one.

    The set is empty when all layers with keys and values have a window or none has: then they are in the full group,
    which keeps every token and applies the window as a mask.
    """
    local = frozenset(layer for layer in range(text.num_hidden_layers) if layer_window(text, layer) is not None)
    num_with_keys = text.num_hidden_layers - len(layers_without_keys(text))
    return local if len(local) < num_with_keys else frozenset()


def layer_window(text: Any, layer: int) -> Window | None:
    """Returns the window of a layer of the type that has one; None for other layers.

    Takes a text configuration of transformers. Layers without types may have a window, too.
    """
    types = getattr(text, "layer_types", None)
    if types and types[layer] == CHUNKED_TYPE:
        return Window(text.attention_chunk_size, is_chunked=True)
    is_sliding = types and types[layer] == "sliding_attention"
    size = getattr(text, "sliding_window", None) if is_sliding else None
    return None if not size else Window(size)
