"""Paged attention behind one call signature, and its registration with transformers' attention interface.

A model loaded with `attn_implementation=PAGED_ATTENTION` calls `_paged_attention` in every layer with the flattened
batch `[1, heads, num_tokens, head_dim]`. `forward_context` provides the step's metadata.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from decoder_svc.runner.kv_cache_spec import KVCacheSpec, layer_window
from decoder_svc.runner.paged_step import PagedStep
from decoder_svc.runner.state_step import StateStep
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.scheduler_output import StateUse
from decoder_svc.scheduling.window import Window
from lookonce.model.structure.latent_attention import latent_projection
from lookonce.model.structure.query_temperature import query_temperature

PAGED_ATTENTION = "lookonce_paged"


@dataclass(frozen=True, slots=True)
class BlockMetadata:
    """Positions of a step's tokens in the pools of one group."""

    # Slot (block · block_size + offset) of every token's key and value, [num_tokens].
    slot_mapping: Tensor
    # Blocks of each sequence in token order, [num_blocks]; empty for a backend with `reads_tensors`.
    block_tables: tuple[Tensor, ...]
    # Index of the token in the first slot of each sequence's first block. Earlier tokens are never read.
    first_keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The sequences of one step, one after the other in the flattened batch."""

    # Blocks of the full group.
    full: BlockMetadata
    # Blocks of the sliding group; None for a model without one.
    sliding: BlockMetadata | None
    # New tokens per sequence.
    query_lens: tuple[int, ...]
    # Tokens per sequence including the new ones.
    kv_lens: tuple[int, ...]
    # Per sequence: spans of tokens that all see each other. Only spans that overlap the new tokens are listed.
    mutual_spans: tuple[tuple[Span, ...], ...]
    # Whether tokens of such a span see each other beyond the window of a layer, too.
    is_mutual_beyond_window: bool
    # The same step as tensors; set for a backend with `reads_tensors`.
    paged: PagedStep | None = None
    # Per sequence: the states of recurrent layers; empty for a model without such layers.
    states: tuple[StateUse, ...] = ()
    # The same as tensors; None for a model without such layers.
    state_step: StateStep | None = None


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Parameters of one layer's attention."""

    # Factor of the products of queries and keys.
    scale: float
    # The earlier tokens that a token sees; None: all of them.
    window: Window | None = None
    # Bound of the scores: softcap · tanh(score / softcap) (Gemma 2, arXiv:2408.00118, section 2). None: no bound.
    softcap: float | None = None
    # Whether tokens see no later ones in this layer, even inside a mutual span.
    is_causal: bool = False


class AttentionBackend(Protocol):
    """Paged attention of one device: owns the KV pools and attends over them."""

    # Name in the log and in metrics.
    name: str
    # True: `forward` reads only `AttentionMetadata.paged` and no tensor value on the host, so a decode step can be
    # recorded as a graph.
    reads_tensors: bool
    # Whether pools can hold rounded keys and values (`KVCacheSpec.is_rounded`).
    can_round: bool

    def block_slots(self, block_size: int) -> int:
        """Returns the slots that a block of `block_size` tokens takes in a pool."""
        ...

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """Allocates and returns the key and value pools, one pair per layer, sized for the layer's group.

        Both of a pair are the same tensor where values are parts of keys (`HeadShape.value_dim`).
        """
        ...

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: LayerOptions,
    ) -> Tensor:
        """Writes `key` and `value` `[num_tokens, kv_heads, head_dim]` to their slots, then attends.

        A layer that reads the keys and values of another one writes nothing: the other has written them. `query` and
        the result are `[num_tokens, heads, head_dim]`. Where values are parts of keys, `value` equals `key`, and
        elements of the result behind those of the values are undefined or missing. A token sees itself, the tokens
        before it (only the last ones if the layer has a window), and every token of a mutual span that it is in, unless
        the layer is causal.
        """
        ...  # fmt: skip


class SdpaBackend:
    """The reference backend for any device: gathers a sequence's keys and values, then calls PyTorch's SDPA."""

    name = "sdpa"
    reads_tensors = False
    can_round = False

    def __init__(self) -> None:
        self._pools: list[tuple[Tensor, Tensor]] = []
        self._sliding_layers: frozenset[int] = frozenset()
        self._window: Window | None = None
        # Layers without keys and values of their own.
        self._reading_layers: frozenset[int] = frozenset()

    def block_slots(self, block_size: int) -> int:
        """Returns `block_size`: each token takes one slot."""
        return block_size

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """Makes pools `[blocks, block_size, kv_heads, head_dim]`."""
        self._sliding_layers, self._window = spec.sliding_layers, spec.window
        self._reading_layers = frozenset(spec.key_sources)

        def pool(layer: int) -> Tensor:
            blocks, heads = spec.num_pool_blocks(layer, num_blocks, num_sliding_blocks), spec.heads(layer)
            return self._pool_zeros((blocks, spec.block_size, heads.num_kv_heads, heads.head_dim), spec.dtype, device)

        self._pools = spec.make_pools(pool)
        return self._pools

    def _pool_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the memory of one pool."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """Implements AttentionBackend.forward: writes to the pools, then calls `attend`."""
        key_pool, value_pool = self._pools[layer]
        group = self._group(layer, metadata, options)
        if layer not in self._reading_layers:
            key_pool.flatten(0, 1).index_copy_(0, group.slot_mapping, key)
            if value_pool is not key_pool:
                value_pool.flatten(0, 1).index_copy_(0, group.slot_mapping, value)
        return self.attend(layer, query, group, metadata, options)

    def attend(
        self, layer: int, query: Tensor, group: BlockMetadata, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """Attends after keys and values have been written to the pools; `group` is the layer's group."""
        output = torch.empty_like(query)
        self._attend_by_sdpa(layer, query, group, metadata, options, range(len(metadata.query_lens)), output)
        return output

    def _attend_by_sdpa(
        self,
        layer: int,
        query: Tensor,
        group: BlockMetadata,
        metadata: AttentionMetadata,
        options: LayerOptions,
        sequences: Collection[int],
        output: Tensor,
    ) -> None:
        """Writes the attention of these sequences to their rows of `output`."""
        key_pool, value_pool = self._pools[layer]
        stop = 0
        for index, blocks in enumerate(group.block_tables):
            start, stop = stop, stop + metadata.query_lens[index]
            if index not in sequences:
                continue
            num_keys = metadata.kv_lens[index] - group.first_keys[index]
            keys = key_pool[blocks].flatten(0, 1)[:num_keys]
            values = value_pool[blocks].flatten(0, 1)[:num_keys]
            mask = _visible_keys(group.first_keys[index], options, metadata, index, query.device)
            output[start:stop] = _attend(query[start:stop], keys, values, mask, options)

    def _group(self, layer: int, metadata: AttentionMetadata, options: LayerOptions) -> BlockMetadata:
        if layer not in self._sliding_layers:
            return metadata.full
        assert metadata.sliding is not None, "the step has no blocks of the sliding group"
        assert options.window == self._window, "the layer's window differs from the sliding group's"
        return metadata.sliding


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: LayerOptions) -> Tensor:
    """Returns the attention of the last `len(query)` tokens of one sequence over all its keys.

    `mask` None means causal; a single query then sees every key.
    """
    if options.softcap is not None:
        return _attend_softcapped(query, keys, values, mask, options.scale, options.softcap)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None and len(query) > 1,
        scale=options.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)


def _attend_softcapped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Computes attention with soft-capped scores, which PyTorch's SDPA does not support; softmax in float32."""
    if mask is None:
        mask = _causal_mask(len(query), len(keys), query.device)
    num_groups, head_dim = query.shape[1] // keys.shape[1], query.shape[2]
    # [kv_heads, groups * query_len, head_dim]
    grouped = query.unflatten(1, (-1, num_groups)).permute(1, 2, 0, 3).reshape(keys.shape[1], -1, head_dim)
    scores = grouped @ keys.permute(1, 2, 0) * scale
    scores = softcap * torch.tanh(scores / softcap)
    hidden = ~mask.repeat(num_groups, 1)
    weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(values.dtype)
    attended = (weights @ values.transpose(0, 1)).view(keys.shape[1], num_groups, len(query), head_dim)
    return attended.permute(2, 0, 1, 3).flatten(1, 2)


def _visible_keys(
    first_key: int, options: LayerOptions, metadata: AttentionMetadata, index: int, device: torch.device
) -> Tensor | None:
    """Returns a mask `[query_len, num_keys]` for sequence `index`, true where a new token sees a key.

    Keys start at token `first_key`. None means that the causal mask is enough.
    """
    window, query_len = options.window, metadata.query_lens[index]
    spans = () if options.is_causal else metadata.mutual_spans[index]
    kv_len = metadata.kv_lens[index]
    num_keys = kv_len - first_key
    # The last chunk may begin anywhere among the keys.
    has_window = window is not None and window.size < (kv_len if window.is_chunked else num_keys)
    if not spans and not has_window and query_len in (1, num_keys):
        return None
    first_query = kv_len - query_len
    visible = _causal_mask(query_len, num_keys, device)
    if has_window and metadata.is_mutual_beyond_window:
        visible &= _window_mask(first_query, query_len, first_key, num_keys, window, device)
    for span in spans:
        queries = slice(max(0, span.offset - first_query), span.stop - first_query)
        visible[queries, max(0, span.offset - first_key) : span.stop - first_key] = True
    if has_window and not metadata.is_mutual_beyond_window:
        visible &= _window_mask(first_query, query_len, first_key, num_keys, window, device)
    return visible


def _causal_mask(query_len: int, kv_len: int, device: torch.device) -> Tensor:
    """Returns the causal mask `[query_len, kv_len]`; the queries are the sequence's last tokens."""
    return torch.ones(query_len, kv_len, dtype=torch.bool, device=device).tril_(kv_len - query_len)


def _window_mask(
    first_query: int, num_queries: int, first_key: int, num_keys: int, window: Window | None, device: torch.device
) -> Tensor:
    """Returns a mask `[num_queries, num_keys]` that is true from the first key that a query sees onwards."""
    assert window is not None, "called for a layer without a window"
    queries = torch.arange(first_query, first_query + num_queries, device=device)
    firsts = queries // window.size * window.size if window.is_chunked else queries - window.size + 1
    return torch.arange(first_key, first_key + num_keys, device=device) >= firsts[:, None]


# Per thread: each engine runs its steps on its own thread.
_context = threading.local()


@contextmanager
def forward_context(backend: AttentionBackend, metadata: AttentionMetadata) -> Iterator[None]:
    """Sets the backend and metadata that attention layers called inside use, on this thread."""
    _context.step = (backend, metadata)
    try:
        yield
    finally:
        del _context.step


def current_step() -> tuple[AttentionBackend, AttentionMetadata]:
    """Returns backend and metadata of the forward pass that this thread runs."""
    step: tuple[AttentionBackend, AttentionMetadata] = _context.step
    return step


def continue_with(metadata: AttentionMetadata) -> None:
    """Gives the layers that this thread calls from now on, inside `forward_context`, other metadata."""
    _context.step = (_context.step[0], metadata)


def _paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    token_positions: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: takes `[1, heads, T, D]`, returns `[1, T, heads, D]`."""
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not served")
    backend, metadata = current_step()
    # Gemma 4: the rows of an image see each other in layers with a window alone.
    is_causal = sliding_window is None and getattr(module.config, "use_bidirectional_attention", None) == "vision"
    temperature = query_temperature(module)
    if temperature is not None:
        query = temperature(query, token_positions)
    latent = latent_projection(module)
    output = backend.forward(
        module.layer_idx,
        query[0].transpose(0, 1) if latent is None else latent.latent_queries(query[0]),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        metadata,
        LayerOptions(scaling, _window(module, sliding_window), softcap, is_causal),
    )
    return (output if latent is None else latent.values(output))[None], None


def _window(module: Any, sliding_window: int | None) -> Window | None:
    """Returns the window of an attention module's layer. Modules pass the size of a sliding window alone."""
    if sliding_window is not None:
        return Window(sliding_window)
    has_chunks = getattr(module.config, "attention_chunk_size", None) is not None
    return layer_window(module.config, module.layer_idx) if has_chunks else None


def register_paged_attention() -> None:
    """Makes PAGED_ATTENTION known to transformers. Call it before loading a model with it; repeating it is harmless."""
    AttentionInterface.register(PAGED_ATTENTION, _paged_attention)
