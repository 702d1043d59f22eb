"""VideoLLaMA 3 (arXiv:2501.13106): images of any size, one row per patch, and positions in sequence.

An image's patches are not merged, unlike Qwen2-VL's. Videos are not taken: the processor drops rows that hardly differ
from those of the frame before, so the rows of a frame depend on its neighbours.
"""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageSizing


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import smart_resize

    return sizing.patch_grid(source.processor, smart_resize)


FAMILY = Family(
    title="VideoLLaMA 3",
    model_type="video_llama_3",
    architecture="VideoLlama3ForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_grid_thw", "image_merge_sizes"),
    has_max_pixels=True,
    processor_arguments=sizing.pixel_size,
)
