"""ERNIE 4.5 VL: Qwen2-VL's layout; the experts of the language model are divided into those of text and of images.

The tokens that begin and end an image go to the experts of images, too. Videos are not taken: the processor draws the
time into each frame, and the projector joins two frames that the tower has processed each by itself.
"""

from __future__ import annotations

from typing import Any

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageSizing, PositionAxes


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import smart_resize

    return sizing.patch_grid(source.processor, smart_resize)


def _image_expert_ids(config: Any) -> tuple[int, ...]:
    return config.image_token_id, config.image_start_token_id, config.image_end_token_id


FAMILY = Family(
    title="ERNIE 4.5 VL",
    model_type="ernie4_5_vl_moe",
    architecture="Ernie4_5_VLMoeForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_grid_thw"),
    axes=PositionAxes.MROPE,
    has_max_pixels=True,
    processor_arguments=sizing.pixel_size,
    image_expert_ids=_image_expert_ids,
)
