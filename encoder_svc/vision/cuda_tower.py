"""Moves a loaded vision half to CUDA and makes it faster there; its output stays the same up to rounding.

Attention in windows is one kernel (varlen_attention.py), MLPs are aligned (aligned_mlp.py), the parts of layers between
matrix products are few kernels (fused_block.py), and layers after the last used feature layer are skipped. Compute the
fingerprint before: it covers the weights as read.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

from encoder_svc.vision.aligned_mlp import is_gated_mlp, is_unaligned_mlp, pad_mlp, replace_gated_mlp
from encoder_svc.vision.unused_layers import skip_unused_layers
from encoder_svc.vision.varlen_attention import use_varlen_attention
from lookonce.devices.cuda import PLATFORM
from lookonce.logs import get_logger

_BLOCK = "encoder_svc.vision.fused_block"
_ROWWISE = "lookonce.model.kernels.triton_rowwise"

_log = get_logger(__name__)


def make_fast(model: Any) -> None:
    """Changes the vision half in place, and logs each change or the reason against it."""
    num_skipped = skip_unused_layers(model)
    model.to(PLATFORM.torch_device())
    use_varlen_attention(model)
    replacements = _Replacements()
    fused_block: Any = None
    gated: Any = None
    try:
        fused_block, gated = importlib.import_module(_BLOCK), importlib.import_module(_ROWWISE).gated
    except ImportError as error:
        replacements.note("kernels", f"Triton cannot be imported ({error})")
    _align_mlps(model, gated, replacements)
    if fused_block is not None:
        _fuse_parts(model, fused_block, replacements)
    _log.info(
        "vision half is made fast",
        num_skipped_layers=num_skipped,
        num_replaced=dict(replacements.num_replaced),
        reasons_against=replacements.reasons,
    )


class _Replacements:
    """Counts what was replaced, and keeps the first reason against a replacement of each kind."""

    def __init__(self) -> None:
        self.num_replaced: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    def note(self, kind: str, reason: str | None) -> None:
        """Takes the reason against one replacement, or None if it was made."""
        if reason is None:
            self.num_replaced[kind] += 1
        else:
            self.reasons.setdefault(kind, reason)


def _align_mlps(model: Any, gated: Any, replacements: _Replacements) -> None:
    # A list of modules would keep all old weights until the last MLP is replaced.
    for path in [path for path, module in model.named_modules() if is_gated_mlp(module) or is_unaligned_mlp(module)]:
        parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        if is_gated_mlp(getattr(parent, name)):
            replacements.note("gated_mlp", replace_gated_mlp(parent, name, gated))
        else:
            replacements.note("mlp", pad_mlp(getattr(parent, name)))


def _fuse_parts(model: Any, fused_block: Any, replacements: _Replacements) -> None:
    """Fuses the parts of layers before the layers, whose trials then run with their new parts."""
    kinds = (
        ("norm", fused_block.is_rms_norm, fused_block.fuse_norm),
        ("attention", fused_block.is_attention, fused_block.fuse_attention),
        ("layer", fused_block.is_block, fused_block.fuse_block),
    )
    for kind, is_kind, fuse in kinds:
        for module in list(model.modules()):
            if is_kind(module):
                replacements.note(kind, fuse(module))
