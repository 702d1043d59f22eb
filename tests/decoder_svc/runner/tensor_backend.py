"""Attention by plain tensor operations on a step's tensors: slow, for any device, recordable as a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep


class TensorBackend(PagedBackend):
    """Gathers the whole block table of every token and masks the keys that it does not see."""

    name = "tensor"

    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        """Implements PagedBackend.attend_paged with gather and einsum."""
        keys, values = self._pools[layer]
        num_tokens, num_heads, head_dim = query.shape
        index = torch.arange(num_tokens, device=query.device)
        sequence = torch.searchsorted(step.query_starts[1:], index, right=True)
        # New tokens are the last ones of a sequence.
        token = (step.kv_lens - step.query_starts[1:])[sequence] + index
        start, stop = _seen(token, step, options.window)
        slots = torch.arange(group.block_table.shape[1] * keys.shape[1], device=query.device)
        other = group.first_keys[sequence][:, None] + slots
        is_seen = (other >= start[:, None]) & (other < stop[:, None])
        # [num_tokens, keys, kv_heads, head_dim]. Set invisible keys to 0, since they may be NaN.
        gathered = [
            pool[group.block_table[sequence]].flatten(1, 2).masked_fill(~is_seen[:, :, None, None], 0.0)
            for pool in (keys, values)
        ]
        grouped = query.view(num_tokens, keys.shape[2], -1, head_dim)
        scores = torch.einsum("tkgd,tnkd->tkgn", grouped, gathered[0]).float() * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = scores.masked_fill(~is_seen[:, None, None], -torch.inf).softmax(-1).to(query.dtype)
        return torch.einsum("tkgn,tnkd->tkgd", weights, gathered[1]).reshape(num_tokens, num_heads, head_dim)


def _seen(token: Tensor, step: PagedStep, window: int | None) -> tuple[Tensor, Tensor]:
    """Returns the tokens [start, stop) of its sequence that every token sees."""
    start = torch.zeros_like(token) if window is None else (token - window + 1).clamp(min=0)
    stop = token + 1
    if step.mutual is not None:
        stop = torch.maximum(stop, step.mutual.stops)
        if step.mutual.is_beyond_window:
            start = torch.minimum(start, step.mutual.starts)
    return start, stop
