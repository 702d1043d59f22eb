"""Idefics2 (arXiv:2405.02246): learned queries read each quarter of an image, then the whole image.

Markers stand around each part. Two images without text between them share one marker, and a word behind a marker gets a
space before it.
"""

from __future__ import annotations

import re

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing

_MARKER = "<fake_token_around_image>"
_NUM_SPLIT = 5
_WORD = re.compile(r"[^\s<]")


def _sizing(source: FamilySource) -> ImageSizing:
    is_split = source.processor.do_image_splitting
    parts = (_MARKER, source.config.perceiver_config.resampler_n_latents)
    # `_closing` adds the last marker.
    whole = ImageShape(parts * (_NUM_SPLIT if is_split else 1))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        if is_split and min(width, height) < 2:
            raise ValueError("an image of one line of pixels has no quarters")
        return whole

    return ImageSizing(shape, whole)


def _closing(behind: str | None) -> str:
    if behind is None:
        return ""
    return f"{_MARKER} " if _WORD.match(behind) else _MARKER


FAMILY = Family(
    title="Idefics2",
    model_type="idefics2",
    architecture="Idefics2ForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "pixel_attention_mask"),
    # The connector's activation is the language model's.
    text_settings=lambda config: {"hidden_act": config.text_config.hidden_act},
    closing=_closing,
)
