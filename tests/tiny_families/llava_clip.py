"""The tiny LLaVA with a CLIP tower that all other tests use, too."""

from __future__ import annotations

from tests import tiny_models

NAME = "llava_clip"

build = tiny_models.build_llava_clip
load_processor = tiny_models.load_processor
