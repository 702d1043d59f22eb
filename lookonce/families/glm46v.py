"""GLM-4.6V: GLM-4.1V's layout (arXiv:2507.01006); the folder's configuration names the tower and the language model.

The time behind a pair of a video's frames has a decimal and a unit.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import glm4v


def _seconds(seconds: float) -> tuple[str, str]:
    return "<|begin_of_image|>", f"<|end_of_image|>{seconds:.1f} seconds"


VIDEO = replace(glm4v.VIDEO, surrounding_text=_seconds)

FAMILY = replace(
    glm4v.FAMILY,
    title="GLM-4.6V",
    model_type="glm46v",
    architecture="Glm46VForConditionalGeneration",
    video=VIDEO,
)
