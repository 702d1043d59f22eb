"""Checks of vision towers that timm builds from a name and arguments in config.json.

By some names, timm reads another folder or asks the model hub. Some of its arguments name files to load. So a family
lists what it takes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# Arguments are sizes and numbers of layers, of the tower or of each of its few stages. Those of all towers are far
# below these.
_LARGEST_NUMBER, _MOST_STAGES, _MOST_LAYERS = 4096, 8, 128
_LAYERS = ("layers", "depth")


def tower_refusal(
    config: Any, names: Collection[str], arguments: Collection[str], model_type: str = "timm_wrapper"
) -> str | None:
    """Returns why a folder's tower is not built, or None if it has one of these names and no other arguments.

    `model_type` is the type that the family's vision configuration has.
    """
    vision = config.vision_config
    if vision.model_type != model_type:
        return f"its vision tower has the type {vision.model_type!r}, but only {model_type} is served"
    # The part behind a dot names weights, which timm would download. Some versions look behind a slash for the tower.
    if vision.architecture.partition(".")[0] not in names or not {"/", ":"}.isdisjoint(vision.architecture):
        return f"its vision tower is {vision.architecture!r}, but only {', '.join(sorted(names))} can be used"
    given = vision.model_args or {}
    others = sorted(given.keys() - set(arguments))
    if others:
        return f"its vision tower has arguments (model_args) that are not known: {', '.join(others)}"
    return next((refusal for name, value in given.items() if (refusal := _argument_refusal(name, value))), None)


def _argument_refusal(name: str, value: Any) -> str | None:
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(number, (int, float)) and not 0 <= number <= _LARGEST_NUMBER for number in numbers):
        return f"{name} of its vision tower must have numbers from 0 to {_LARGEST_NUMBER}, not {str(value)[:100]}"
    if len(numbers) > _MOST_STAGES:
        return f"{name} of its vision tower has {len(numbers)} numbers, but at most {_MOST_STAGES} are known"
    if name in _LAYERS and sum(number for number in numbers if isinstance(number, int)) > _MOST_LAYERS:
        return f"its vision tower has more than {_MOST_LAYERS} layers ({name})"
    return None
