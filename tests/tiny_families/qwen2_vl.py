"""The tiny Qwen2-VL that all other tests use, too."""

from __future__ import annotations

from tests import tiny_models

NAME = "qwen2_vl"

build = tiny_models.build_qwen2_vl
load_processor = tiny_models.load_processor
