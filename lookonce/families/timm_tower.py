"""Checks of vision towers that timm builds from a name and arguments in config.json.

By some names, timm reads another folder or asks the model hub. Some of its arguments name files to load. So a family
lists what it takes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# Arguments are sizes and numbers of layers; those of all towers are far below it.
_LARGEST_NUMBER = 4096


def tower_refusal(
    config: Any, names: Collection[str], arguments: Collection[str], model_type: str = "timm_wrapper"
) -> str | None:
    """Returns why a folder's tower is not built, or None if it has one of these names and no other arguments.

    `model_type` is the type that the family's vision configuration has.
    """
    vision = config.vision_config
    if vision.model_type != model_type:
        return f"its vision tower has the type {vision.model_type!r}, but only {model_type} is served"
    # The part behind a dot names weights, which timm would download.
    if vision.architecture.partition(".")[0] not in names:
        return f"its vision tower is {vision.architecture!r}, but only {', '.join(sorted(names))} can be used"
    given = vision.model_args or {}
    others = sorted(given.keys() - set(arguments))
    if others:
        return f"its vision tower has arguments (model_args) that are not known: {', '.join(others)}"
    for name, value in given.items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(number, (int, float)) and not 0 <= number <= _LARGEST_NUMBER for number in numbers):
            return f"{name} of its vision tower must have numbers from 0 to {_LARGEST_NUMBER}, not {value}"
    return None
