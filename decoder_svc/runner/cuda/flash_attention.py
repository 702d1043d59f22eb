"""Attention by the flash-attn package (FlashAttention-2, arXiv:2307.08691), an optional dependency.

The package has no masks for mutual spans and for chunks of a sequence: steps with such spans, and layers with chunks,
go to a fallback backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep

# "Paged KV cache block size must be divisible by 256" (flash-attn 2.8).
PAGE_MULTIPLE = 256
DTYPES = frozenset({torch.float16, torch.bfloat16})
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class FlashFunctions:
    """The functions of flash-attn that the backend calls."""

    varlen: Callable[..., Tensor]
    with_kvcache: Callable[..., Tensor]


def load_flash_functions() -> FlashFunctions:
    """Imports the package. Raises ImportError if it is not installed or was built for another PyTorch."""
    package = importlib.import_module("flash_attn")
    return FlashFunctions(package.flash_attn_varlen_func, package.flash_attn_with_kvcache)


class FlashBackend(PagedBackend):
    """Attention by flash-attn: its decode function for single tokens, its variable-length function for chunks."""

    name = "flash-attn"

    def __init__(self, functions: FlashFunctions, fallback: PagedBackend | None) -> None:
        """`fallback` serves steps with mutual spans and layers with chunks; None for a model with neither."""
        super().__init__()
        self._functions = functions
        self._fallback = fallback

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """Implements AttentionBackend.allocate, and shares the pools with the fallback."""
        pools = super().allocate(spec, num_blocks, num_sliding_blocks, device)
        if self._fallback is not None:
            self._fallback.share_pools(self)
        return pools

    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        """Implements PagedBackend.attend_paged with the package's functions."""
        window = options.window
        if (step.mutual is not None and not options.is_causal) or (window is not None and window.is_chunked):
            assert self._fallback is not None, "mutual spans and chunks need a fallback backend"
            return self._fallback.attend_paged(layer, query, group, step, options)
        keys, values = self._pools[layer]
        # Block tables start at the first block that is kept, so count keys from there. Only distances matter.
        kept_lens = step.kv_lens - group.first_keys
        shared = {
            "block_table": group.block_table,
            "softmax_scale": options.scale,
            # The queries are the last tokens: the package aligns the mask to the lower right corner.
            "causal": True,
            "window_size": (-1, -1) if window is None else (window.size - 1, 0),
            "softcap": options.softcap or 0.0,
        }
        if step.max_query_len == 1:
            attended = self._functions.with_kvcache(query[:, None], keys, values, cache_seqlens=kept_lens, **shared)
            return attended[:, 0]
        kept_starts = torch.zeros_like(step.query_starts)
        torch.cumsum(kept_lens, 0, dtype=torch.int32, out=kept_starts[1:])
        return self._functions.varlen(
            query.contiguous(),
            keys,
            values,
            cu_seqlens_q=step.query_starts,
            cu_seqlens_k=kept_starts,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_kv_len,
            **shared,
        )
