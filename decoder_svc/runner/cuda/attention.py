"""Chooses the attention backend of a CUDA device: flash-attn, else our Triton kernel, else PyTorch.

Each candidate computes a small step first. A backend that does not compile here, or whose results differ from
PyTorch's, is not used.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoder_svc.runner.attention import AttentionBackend, SdpaBackend
from decoder_svc.runner.attention_trial import AttentionTrial
from decoder_svc.runner.cuda import flash_attention
from decoder_svc.runner.cuda.flash_attention import FlashBackend, load_flash_functions
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec

logger = logging.getLogger(__name__)

# Accepted differences through rounding in the element type, for values around 1.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# The same where keys and values are rounded to 8 bits.
_ROUNDED_TOLERANCE = 0.15
# Our kernel pads heads to a power of two, and keeps the sums of all rows of a program in registers. Where values are
# parts of keys, these are the sums of values, and the rest of a key is apart.
_MAX_TRITON_HEAD_DIM, _MAX_TRITON_REST = 512, 64
# (cached tokens, new tokens) per sequence in the trial steps: one step with a chunk, one with single tokens only, and
# one without cached tokens.
_TRIAL_CHUNKS = ((5, 20), (40, 1), (0, 1))
_TRIAL_DECODES = ((37, 1), (40, 1), (0, 1))
_TRIAL_PROMPTS = ((0, 20), (0, 33), (0, 1))


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Properties of model and device that decide about the backend."""

    # Numbers of query heads that layers have.
    head_counts: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # Tokens of a KV block.
    block_size: int
    # Whether tokens of an image or a prompt see later tokens, and whether layers attend within chunks of the sequence.
    has_mutual_spans: bool
    has_chunks: bool
    device: torch.device
    # Compute capability, (major, minor).
    capability: tuple[int, int]
    # Number of streaming multiprocessors.
    num_processors: int
    # Shared memory that a program can have.
    shared_bytes: int
    # Whether keys and values are rounded in the pools.
    is_rounded: bool = False
    # Values are the first elements of keys, so many of them; None: they are apart.
    value_dim: int | None = None


class _UnfitError(Exception):
    """A backend cannot be used; the message gives the reason."""


def cuda_attention(needs: AttentionNeeds) -> AttentionBackend:
    """Returns the fastest backend that works here; logs why faster ones were rejected."""
    reasons = []
    candidates: tuple[Callable[[AttentionNeeds], PagedBackend], ...] = (_flash, _triton)
    for candidate in candidates:
        try:
            backend = candidate(needs)
            _check_on_trial(backend, needs)
        except _UnfitError as error:
            reasons.append(str(error))
            continue
        logger.info("attention backend %s%s", backend.name, _reason_text(reasons))
        return backend
    plain = SdpaBackend()
    logger.warning("attention backend %s, slower and without graphs%s", plain.name, _reason_text(reasons))
    return plain


def _reason_text(reasons: list[str]) -> str:
    return f": {'; '.join(reasons)}" if reasons else ""


def _flash(needs: AttentionNeeds) -> PagedBackend:
    if needs.is_rounded:
        raise _UnfitError("flash-attn does not read keys and values of 8 bits")
    try:
        functions = load_flash_functions()
    except (ImportError, AttributeError) as error:
        raise _UnfitError(f"flash-attn cannot be imported ({error})") from error
    if needs.block_size % flash_attention.PAGE_MULTIPLE:
        multiple = flash_attention.PAGE_MULTIPLE
        raise _UnfitError(f"flash-attn needs a block_size that is a multiple of {multiple}, not {needs.block_size}")
    if needs.dtype not in flash_attention.DTYPES:
        raise _UnfitError(f"flash-attn does not compute in {needs.dtype}")
    if needs.head_dim > flash_attention.MAX_HEAD_DIM or needs.head_dim % 8:
        raise _UnfitError(f"flash-attn does not support a head size of {needs.head_dim}")
    if needs.capability < flash_attention.MIN_CAPABILITY:
        raise _UnfitError(f"flash-attn does not run on compute capability {needs.capability}")
    return FlashBackend(functions, _triton(needs) if needs.has_mutual_spans or needs.has_chunks else None)


def _triton(needs: AttentionNeeds) -> PagedBackend:
    try:
        module = importlib.import_module("decoder_svc.runner.cuda.triton_attention")
    except ImportError as error:
        raise _UnfitError(f"Triton cannot be imported ({error})") from error
    value_dim = needs.value_dim or needs.head_dim
    if value_dim > _MAX_TRITON_HEAD_DIM:
        raise _UnfitError(f"our kernel takes heads of at most {_MAX_TRITON_HEAD_DIM} elements, not {value_dim}")
    if needs.head_dim - value_dim > _MAX_TRITON_REST:
        rest = needs.head_dim - value_dim
        raise _UnfitError(f"our kernel takes at most {_MAX_TRITON_REST} elements beside a latent, not {rest}")
    backend: PagedBackend = module.TritonBackend(needs.num_processors, needs.shared_bytes)
    return backend


def _check_on_trial(backend: PagedBackend, needs: AttentionNeeds) -> None:
    """Raises _UnfitError if the backend fails on a small step or its results differ from PyTorch's."""
    # Only new tokens are rounded in a trial.
    trials = (_TRIAL_PROMPTS,) if needs.is_rounded else (_TRIAL_CHUNKS, _TRIAL_DECODES)
    tolerance = _ROUNDED_TOLERANCE if needs.is_rounded else _TOLERANCES[needs.dtype]
    for chunks, num_heads in itertools.product(trials, needs.head_counts):
        try:
            difference = _difference(backend, needs, chunks, num_heads)
        except Exception as error:  # compilers and drivers raise many types
            logger.debug("attention backend %s failed its trial", backend.name, exc_info=True)
            raise _UnfitError(f"{backend.name} fails on this device ({type(error).__name__})") from error
        # Written with `not` so that NaN fails.
        if not difference < tolerance:
            raise _UnfitError(f"{backend.name} differs from PyTorch by {difference:.2g} on this device")


def _difference(
    backend: PagedBackend, needs: AttentionNeeds, chunks: tuple[tuple[int, int], ...], num_heads: int
) -> float:
    """Returns the largest difference between the backend's results and PyTorch's, in one layer without a window."""
    spec = KVCacheSpec(
        num_layers=1,
        num_kv_heads=needs.num_kv_heads,
        head_dim=needs.head_dim,
        dtype=needs.dtype,
        block_size=needs.block_size,
        is_rounded=needs.is_rounded,
        value_dim=needs.value_dim,
    )
    trial = AttentionTrial(spec, num_heads, chunks, needs.device)
    one, other = (trial.prepared(each)()[..., : needs.value_dim].float() for each in (SdpaBackend(), backend))
    return float((one - other).abs().max())
