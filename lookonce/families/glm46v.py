"""GLM-4.6V: GLM-4.1V's layout (arXiv:2507.01006); the folder's configuration names the tower and the language model."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import glm4v

FAMILY = replace(glm4v.FAMILY, title="GLM-4.6V", model_type="glm46v", architecture="Glm46VForConditionalGeneration")
