"""Attention of towers with windows on CUDA, an implementation for transformers.

The towers of the Qwen family pass the bounds of all windows. With SDPA, transformers reads them on the host in every
layer and calls SDPA once for each window: 2,804 calls and 96 waits for one image of 1036 × 1036. With an implementation
whose name contains "flash", it makes one call per layer.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lookonce.logs import get_logger

NAME = "lookonce_flash_windows"
_KERNEL = "encoder_svc.vision.varlen_kernel"
# Bounds of windows, heads and elements of a head that are compared with SDPA at the start.
_CHECKED = (((0, 64, 96, 97, 200), 2, 80), ((0, 33), 3, 72), ((0, 16, 32, 48), 1, 64))
# Largest accepted difference, relative to the norm of the output.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# Queries, keys and values [num_tokens, heads, head_dim], bounds of windows, scale.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]

_log = get_logger(__name__)


def use_varlen_attention(model: Any) -> bool:
    """Switches SDPA layers that take bounds of windows to one kernel call each, and logs the choice with its reason."""
    configs = [
        module.config
        for module in model.modules()
        if hasattr(module, "config") and "cu_seqlens" in inspect.signature(type(module).forward).parameters
    ]
    configs = [config for config in configs if config._attn_implementation == "sdpa"]
    reason = _register(model.dtype, model.device) if configs else "no layer takes bounds of windows"
    if reason is None:
        for config in configs:
            config._attn_implementation = NAME
    _log.info("attention of the vision half", backend="sdpa" if reason else "triton", reason=reason)
    return reason is None


def agrees_with_sdpa(attend: Attend, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the output for random heads in several windows is that of PyTorch."""
    generator = torch.Generator().manual_seed(0)
    for bounds, num_heads, head_dim in _CHECKED:
        parts = torch.randn(3, bounds[-1], num_heads, head_dim, generator=generator).to(device, dtype)
        query, keys, values = parts.unbind()
        found = attend(query, keys, values, torch.tensor(bounds, dtype=torch.int32).to(device), 0.1)
        for start, stop in itertools.pairwise(bounds):
            window = (part[start:stop].transpose(0, 1)[None] for part in (query, keys, values))
            wanted = torch.nn.functional.scaled_dot_product_attention(*window, scale=0.1)[0].transpose(0, 1).float()
            # Written with `not` so that NaN counts as a difference.
            if not bool((found[start:stop].float() - wanted).norm() <= _TOLERANCES[dtype] * wanted.norm()):
                return False
    return True


def _register(dtype: torch.dtype, device: torch.device) -> str | None:
    """Registers the implementation in transformers. Returns None, or the reason why it cannot be used."""
    try:
        attend: Attend = importlib.import_module(_KERNEL).attend_in_windows
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        if not agrees_with_sdpa(attend, dtype, device):
            return "the kernel gives other values than PyTorch"
    except Exception as error:  # compilers and drivers raise many types
        return f"the kernel fails on this device ({type(error).__name__})"

    def forward(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        bounds = arguments.get("cu_seq_lens_q")
        if bounds is None or attention_mask is not None:
            found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
            return found
        # [1, heads, num_tokens, head_dim]; windows never reach over images, so the batch has one entry.
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        return attend(query, key, value, bounds, arguments["scaling"])[None], None

    transformers.AttentionInterface.register(NAME, forward)
    transformers.AttentionMaskInterface.register(NAME, sdpa_mask)
    return None
