"""Makes a loaded vision half faster on CPUs; its output stays the same up to rounding. Knows modules by structure.

Linear layers are those of the kernel that is fastest here (lookonce/model/kernels/linear_trial.py), an activation
between two of them is fused into the first, attention is native (dense_attention.py), and layers after the last used
feature layer are skipped. Compute the fingerprint before: it covers the weights as read.
"""

from __future__ import annotations

from typing import Any

import torch

from encoder_svc.vision.dense_attention import use_dense_attention
from encoder_svc.vision.unused_layers import skip_unused_layers
from lookonce.logs import get_logger
from lookonce.model.half_model import detach_from_file
from lookonce.model.kernels.activation import activation_of, output_of
from lookonce.model.kernels.linear_layers import LayerMaker, replace_linears
from lookonce.model.kernels.linear_trial import choose_image_linear, layer_maker

# Blocks are compared on this many random rows.
_NUM_ROWS = 4
# Relative to the norm of a block's output. In bfloat16 a fused activation is rounded once instead of twice.
_BLOCK_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}

_log = get_logger(__name__)


def make_fast(model: Any) -> None:
    """Changes the vision half in place, and logs each change or the reason against it."""
    num_skipped = skip_unused_layers(model)
    make = layer_maker(choose_image_linear(model.dtype))
    num_fused, num_replaced = 0, 0
    if make is not None:
        num_fused = sum(fuse_activation(block, make) for block in list(model.modules()))
        num_replaced = replace_linears(model, make)
    _log.info(
        "vision half is made fast",
        num_fused_activations=num_fused,
        num_replaced_linears=num_replaced,
        num_skipped_layers=num_skipped,
    )
    if num_fused or num_replaced:
        detach_from_file(model)
    use_dense_attention(model)


def fuse_activation(block: torch.nn.Module, make: LayerMaker) -> bool:
    """Fuses the activation of a block linear → activation → linear into a first layer made by `make`.

    Returns whether the block had this form and its output stayed the same.
    """
    children = dict(block.named_children())
    linears = [name for name, child in children.items() if type(child) is torch.nn.Linear]
    others = [name for name, child in children.items() if not isinstance(child, (torch.nn.Linear, torch.nn.Dropout))]
    if len(linears) != 2 or len(others) != 1:
        return False
    activation = activation_of(children[others[0]])
    if activation is None:
        return False
    for name in linears:
        first = children[name]
        if (layer := make(first, activation)) is None:
            continue
        rows = torch.randn(_NUM_ROWS, first.in_features, generator=torch.Generator().manual_seed(0))
        rows = rows.to(first.weight.dtype)
        expected = output_of(block, rows)
        setattr(block, name, layer)
        setattr(block, others[0], torch.nn.Identity())
        if expected is not None and _is_close(output_of(block, rows), expected):
            return True
        setattr(block, name, first)
        setattr(block, others[0], children[others[0]])
    return False


def _is_close(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if found is None or found.shape != expected.shape:
        return False
    distance = (found.float() - expected.float()).norm()
    return bool(distance <= _BLOCK_TOLERANCE[expected.dtype] * expected.float().norm())
