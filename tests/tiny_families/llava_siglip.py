"""The tiny LLaVA with a SigLIP tower that all other tests use, too."""

from __future__ import annotations

from tests import tiny_models

NAME = "llava_siglip"

build = tiny_models.build_llava_siglip
load_processor = tiny_models.load_processor
