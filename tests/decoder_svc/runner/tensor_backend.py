"""Attention by plain tensor operations on a step's tensors: slow, for any device, recordable as a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep


class TensorBackend(PagedBackend):
    """Computes the scores of all tokens with all keys of the pool and masks those of keys that a token does not see."""

    name = "tensor"

    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        """Implements PagedBackend.attend_paged with scatter and einsum."""
        keys, values = self._pools[layer]
        num_tokens, num_heads, head_dim = query.shape
        index = torch.arange(num_tokens, device=query.device)
        sequence = torch.searchsorted(step.query_starts[1:], index, right=True)
        # New tokens are the last ones of a sequence.
        token = (step.kv_lens - step.query_starts[1:])[sequence] + index
        start, stop = _seen(token, step, options)
        slots = torch.arange(group.block_table.shape[1] * keys.shape[1], device=query.device)
        other = group.first_keys[sequence][:, None] + slots
        is_seen = (other >= start[:, None]) & (other < stop[:, None])
        # [num_tokens, places in the pool]. A table may name a block again that it does not use.
        places = group.block_table[:, :, None] * keys.shape[1] + torch.arange(keys.shape[1], device=query.device)
        is_key = torch.zeros(num_tokens, keys.shape[0] * keys.shape[1], dtype=torch.int32, device=query.device)
        is_key = is_key.scatter_add(1, places.flatten(1)[sequence], is_seen.int()) > 0
        # [places, kv_heads, head_dim]. Set keys that nobody sees to 0, since they may be NaN.
        is_unseen = ~is_key.any(0)[:, None, None]
        all_keys, all_values = (pool.flatten(0, 1).masked_fill(is_unseen, 0.0) for pool in (keys, values))
        grouped = query.view(num_tokens, keys.shape[2], -1, head_dim)
        scores = torch.einsum("tkgd,nkd->tkgn", grouped, all_keys).float() * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = scores.masked_fill(~is_key[:, None, None], -torch.inf).softmax(-1).to(query.dtype)
        return torch.einsum("tkgn,nkd->tkgd", weights, all_values).reshape(num_tokens, num_heads, head_dim)


def _seen(token: Tensor, step: PagedStep, options: LayerOptions) -> tuple[Tensor, Tensor]:
    """Returns the tokens [start, stop) of its sequence that every token sees."""
    window = options.window
    start = torch.zeros_like(token)
    if window is not None:
        size = window.size
        start = token - token % size if window.is_chunked else (token - size + 1).clamp(min=0)
    stop = token + 1
    if step.mutual is not None and not options.is_causal:
        stop = torch.maximum(stop, step.mutual.stops)
        if step.mutual.is_beyond_window:
            start = torch.minimum(start, step.mutual.starts)
    return start, stop
