"""Latent attention (MLA, DeepSeek-V2, arXiv:2405.04434) in its absorbed form, in transformers' attention modules.

Such a module keeps a latent of each token and a rotary key that all heads share. `kv_b_proj` makes the keys and values
of all heads from the latent. In the absorbed form, one half of its weight is applied to the queries instead, and the
other half to the results: q · (K c) = (Kᵀ q) · c. Attention then has one key head. Its keys are the latent and the
rotary key, and its values are the latent. The module's `forward` stays transformers'; only `expand_kv` and `kv_b_proj`
are replaced (docs/adr/0058).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LatentProjection(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The two halves of `kv_b_proj`: one that is applied to queries, and one that is applied to attended latents."""

    def __init__(self, weight: Tensor, num_heads: int, key_dim: int, value_dim: int) -> None:
        """`weight` is that of `kv_b_proj`, `[num_heads * (key_dim + value_dim), rank]`; it is copied."""
        super().__init__()
        self.rank = weight.shape[1]
        self._num_heads, self._key_dim = num_heads, key_dim
        by_head = weight.detach().view(num_heads, key_dim + value_dim, self.rank)
        keys, values = by_head[:, :key_dim], by_head[:, key_dim:].transpose(1, 2)
        # Both have the order in which PyTorch multiplies without turning them around in each step. Other parameters
        # with three dimensions are experts, which may stay in the mapped file.
        self.key_half = _parameter(keys)
        self.value_half = _parameter(values)

    def latent_queries(self, queries: Tensor) -> Tensor:
        """Returns queries for latents, `[num_tokens, heads, rank + rotary]`.

        Takes the module's, `[heads, num_tokens, key_dim + rotary]`; the rotary part stays.
        """
        plain, rotary = queries[..., : self._key_dim], queries[..., self._key_dim :]
        latent = torch.bmm(plain, self.key_half.view(self._num_heads, self._key_dim, self.rank))
        return torch.cat((latent, rotary), dim=-1).transpose(0, 1)

    def values(self, attended: Tensor) -> Tensor:
        """Returns each head's values, `[num_tokens, heads, value_dim]`, from latents `[num_tokens, heads, ≥ rank]`."""
        latents = attended[..., : self.rank].transpose(0, 1)
        return torch.bmm(latents, self.value_half.view(self._num_heads, self.rank, -1)).transpose(0, 1)


def _parameter(by_head: Tensor) -> torch.nn.Parameter:
    """Returns a copy `[heads * rows, columns]` of `[heads, rows, columns]`."""
    copied = by_head.clone(memory_format=torch.contiguous_format)
    return torch.nn.Parameter(copied.view(-1, by_head.shape[-1]), requires_grad=False)


def absorb_latents(text_model: torch.nn.Module) -> int:
    """Changes a loaded text model's latent attention in place to the absorbed form; returns the number of layers.

    Attention is then called with one key head, and with a value equal to the key; see `latent_projection`. Weights of
    `kv_b_proj` that are stored as codes are made whole.
    """
    found = [module for module in text_model.modules() if hasattr(module, "expand_kv")]
    with torch.no_grad():
        for module in found:
            sizes = module.num_heads, module.qk_nope_head_dim, module.v_head_dim
            module.kv_b_proj = LatentProjection(module.kv_b_proj.weight, *sizes).eval()
            module.expand_kv = _latent_keys
    return len(found)


def latent_projection(module: Any) -> LatentProjection | None:
    """Returns the projection of an attention module in the absorbed form; None for any other module."""
    found = getattr(module, "kv_b_proj", None)
    return found if isinstance(found, LatentProjection) else None


def _latent_keys(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces `expand_kv`: takes `[1, 1, num_tokens, …]`, and returns keys that are their own values."""
    keys = torch.cat((latent, rotary), dim=-1)
    return keys, keys
