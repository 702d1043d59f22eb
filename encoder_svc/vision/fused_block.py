"""Forward passes with our Triton kernels for parts of a vision tower's layers, which keep their weights.

Parts are recognised by their structure. Each new forward pass is compared with the one that it replaces.

Importing this module needs Triton.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from encoder_svc.vision.module_trial import (
    ATTENTION_SCALES,
    LAYER_SCALES,
    NORM_SCALES,
    NUM_ROWS,
    random_rows,
    replacement_problem,
)
from encoder_svc.vision.rotary_kernel import rotated_heads
from encoder_svc.vision.varlen_attention import NAME
from encoder_svc.vision.varlen_kernel import attend_in_windows
from lookonce.model.kernels.triton_rowwise import add_norm

# Elements of a row that one program of the norm's kernel holds.
_MAX_NORM_SIZE = 16_384
# Bounds of the windows of a trial.
_BOUNDS = (0, 23, NUM_ROWS)


def is_rms_norm(module: Any) -> bool:
    """Whether a module has what transformers' RMS norms have: a weight per column and an epsilon, and nothing else."""
    names = [name for name, _ in module.named_parameters()]
    return (
        names == ["weight"]
        and not list(module.children())
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and module.weight.ndim == 1
        and len(module.weight) <= _MAX_NORM_SIZE
    )


def fuse_norm(norm: Any) -> str | None:
    """Gives an RMS norm one kernel. Returns the reason against it, or None."""
    forward = functools.partial(_normed, norm, norm.forward)
    return _changed(norm, forward, random_rows(len(norm.weight), norm.weight), NORM_SCALES)


def is_attention(module: Any) -> bool:
    """Whether a module is attention in windows, with one projection for queries, keys and values, and no norms."""
    children = dict(module.named_children())
    return (
        children.keys() == {"qkv", "proj"}
        and not list(module.parameters(recurse=False))
        and _takes_windows(module)
        and module.head_dim % 2 == 0
        and all(type(child) is torch.nn.Linear for child in children.values())
        and getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME
    )


def fuse_attention(attention: Any) -> str | None:
    """Gives attention one kernel for rotary embedding, whose output is not copied. Returns the reason against it."""
    forward = functools.partial(_attended, attention)
    rows = random_rows(attention.qkv.in_features, attention.qkv.weight)
    return _changed(attention, forward, rows, ATTENTION_SCALES, **_arguments(attention, rows.device))


def is_block(module: Any) -> bool:
    """Whether a module is a layer with an attention and an MLP, both after an RMS norm."""
    children = dict(module.named_children())
    return (
        children.keys() == {"norm1", "norm2", "attn", "mlp"}
        and not list(module.parameters(recurse=False))
        and is_rms_norm(children["norm1"])
        and is_rms_norm(children["norm2"])
        and _takes_windows(children["attn"])
    )


def fuse_block(block: Any) -> str | None:
    """Gives a layer one kernel for its first sum and the norm of it. Returns the reason against it, or None."""
    rows = random_rows(len(block.norm1.weight), block.norm1.weight)
    forward = functools.partial(_layer_output, block, block.forward)
    return _changed(block, forward, rows, LAYER_SCALES, **_arguments(block.attn, rows.device))


def _takes_windows(module: Any) -> bool:
    """Whether attention takes bounds of windows and angles for heads of a known size."""
    parameters = inspect.signature(type(module).forward).parameters
    return "cu_seqlens" in parameters and "position_embeddings" in parameters and hasattr(module, "head_dim")


def _changed(
    module: Any, forward: Callable[..., Tensor], rows: Tensor, scales: Sequence[float], **named: Any
) -> str | None:
    """Replaces the forward pass of one module if both agree."""
    reason = replacement_problem(module, forward, rows, scales, **named)
    if reason is None:
        # The module stays, because transformers finds layers by their classes.
        module.forward = forward
    return reason


def _arguments(attention: Any, device: torch.device) -> dict[str, Any]:
    """Returns bounds of windows, and the cosines and sines of random angles."""
    angles = torch.randn(2, NUM_ROWS, attention.head_dim, generator=torch.Generator().manual_seed(1))
    cosines, sines = angles.cos()[0].to(device), angles.sin()[1].to(device)
    bounds = torch.tensor(_BOUNDS, dtype=torch.int32).to(device)
    return {"cu_seqlens": bounds, "position_embeddings": (cosines, sines)}


def _normed(norm: Any, slow: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    """The forward pass of an RMS norm."""
    if hidden_states.dtype != norm.weight.dtype:
        return slow(hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
    return add_norm(rows, None, norm.weight, norm.variance_epsilon)[1].view(hidden_states.shape)


def _attended(
    attention: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> Tensor:
    """The forward pass of attention on `[num_tokens, hidden_size]`."""
    merged = attention.qkv(hidden_states)
    num_heads, head_dim = attention.num_heads, attention.head_dim
    num_kv_heads = (merged.shape[1] // head_dim - num_heads) // 2
    rotated = rotated_heads(merged, *position_embeddings, num_heads + num_kv_heads)
    values = merged.view(len(merged), -1, head_dim)[:, num_heads + num_kv_heads :]
    query, keys = rotated[:, :num_heads], rotated[:, num_heads:]
    attended = attend_in_windows(query, keys, values, cu_seqlens, attention.scaling)
    output: Tensor = attention.proj(attended.flatten(1))
    return output


def _layer_output(
    block: Any, slow: Callable[..., Tensor], hidden_states: Tensor, *arguments: Any, **named: Any
) -> Tensor:
    """The forward pass of a layer on `[num_tokens, hidden_size]`."""
    norm = block.norm2
    if hidden_states.ndim != 2 or hidden_states.dtype != norm.weight.dtype:
        return slow(hidden_states, *arguments, **named)
    delta = block.attn(block.norm1(hidden_states), *arguments, **named)
    summed, normed = add_norm(hidden_states.contiguous(), delta, norm.weight, norm.variance_epsilon)
    return summed + block.mlp(normed)
