"""Empties the layers of a vision tower whose output no feature needs."""

from __future__ import annotations

from typing import Any

import torch

from lookonce.families.registry import FAMILIES


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


def _identity(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """The forward pass of an emptied layer: returns its input."""
    return hidden_states
