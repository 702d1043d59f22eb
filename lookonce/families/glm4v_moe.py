"""GLM-4.5V (arXiv:2507.01006): GLM-4.1V with a mixture of experts in the language model and the same vision half."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import glm4v

FAMILY = replace(
    glm4v.FAMILY, title="GLM-4.5V", model_type="glm4v_moe", architecture="Glm4vMoeForConditionalGeneration"
)
