"""Makes a loaded vision half faster on CPUs; its output stays the same up to rounding. Knows modules by structure.

Linear layers are those of the kernel that is fastest here (lookonce/model/kernels/linear_trial.py), an activation
between two of them is fused into the first, attention is native (dense_attention.py), and layers after the last used
feature layer are skipped. Compute the fingerprint before: it covers the weights as read.
"""

from __future__ import annotations

from typing import Any

import torch

from encoder_svc.vision.dense_attention import use_dense_attention
from lookonce.families.registry import FAMILIES
from lookonce.logs import get_logger
from lookonce.model.half_model import detach_from_file
from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.linear_layers import LayerMaker, replace_linears
from lookonce.model.kernels.linear_trial import choose_image_linear, layer_maker

# Activations are recognised by their values at these points, blocks are compared on this many random rows.
_PROBE_END = 8.0
_NUM_PROBES = 1001
_NUM_ROWS = 4
_ACTIVATION_TOLERANCE = 1e-5
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


def skip_unused_layers(model: Any) -> int:
    """Empties the tower's layers after the last one whose output is a feature (LLaVA-1.5 leaves out one).

    Returns the number of emptied layers. They stay in place and return their input, because transformers counts hidden
    states by layers.
    """
    wanted = FAMILIES[model.config.model_type].feature_layers(model.config)
    tower = getattr(model.model, "vision_tower", None)
    if wanted is None or tower is None:
        return 0
    num_layers: int = getattr(tower.config, "num_hidden_layers", 0)
    stacks = [module for module in tower.modules() if isinstance(module, torch.nn.ModuleList)]
    stacks = [stack for stack in stacks if num_layers and len(stack) == num_layers]
    if len(stacks) != 1:
        return 0
    # Hidden state 0 is the first layer's input.
    numbers = [number % (num_layers + 1) for number in ([wanted] if isinstance(wanted, int) else wanted)]
    unused = list(stacks[0])[max(numbers) :]
    for layer in unused:
        for name, _ in list(layer.named_children()):
            delattr(layer, name)
        layer.forward = _identity
    return len(unused)


def fuse_activation(block: torch.nn.Module, make: LayerMaker) -> bool:
    """Fuses the activation of a block linear → activation → linear into a first layer made by `make`.

    Returns whether the block had this form and its output stayed the same.
    """
    children = dict(block.named_children())
    linears = [name for name, child in children.items() if type(child) is torch.nn.Linear]
    others = [name for name, child in children.items() if not isinstance(child, (torch.nn.Linear, torch.nn.Dropout))]
    if len(linears) != 2 or len(others) != 1:
        return False
    activation = _activation_of(children[others[0]])
    if activation is None:
        return False
    for name in linears:
        first = children[name]
        if (layer := make(first, activation)) is None:
            continue
        rows = torch.randn(_NUM_ROWS, first.in_features, generator=torch.Generator().manual_seed(0))
        rows = rows.to(first.weight.dtype)
        expected = _output(block, rows)
        setattr(block, name, layer)
        setattr(block, others[0], torch.nn.Identity())
        if expected is not None and _is_close(_output(block, rows), expected):
            return True
        setattr(block, name, first)
        setattr(block, others[0], children[others[0]])
    return False


def _identity(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """The forward pass of an emptied layer: returns its input."""
    return hidden_states


def _activation_of(module: torch.nn.Module) -> Activation | None:
    probes = torch.linspace(-_PROBE_END, _PROBE_END, _NUM_PROBES)
    values = _output(module, probes)
    if values is None or values.shape != probes.shape:
        return None
    known = (one for one in Activation if one is not Activation.NONE)
    return next((one for one in known if (one.function(probes) - values).abs().max() < _ACTIVATION_TOLERANCE), None)


def _output(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor | None:
    """A module's output for one tensor; None when it cannot be called with one tensor."""
    try:
        with torch.inference_mode():
            output = module(rows)
    except (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError):
        return None
    return output if isinstance(output, torch.Tensor) else None


def _is_close(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if found is None or found.shape != expected.shape:
        return False
    distance = (found.float() - expected.float()).norm()
    return bool(distance <= _BLOCK_TOLERANCE[expected.dtype] * expected.float().norm())
