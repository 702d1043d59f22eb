"""GLM-OCR (arXiv:2603.10910): GLM-4.1V's layout; a smaller tower norms queries and keys and learns no positions."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import glm4v

FAMILY = replace(
    glm4v.FAMILY, title="GLM-OCR", model_type="glm_ocr", architecture="GlmOcrForConditionalGeneration", video=None
)
