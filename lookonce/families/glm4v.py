"""GLM-4.1V (arXiv:2507.01006): one row per merged patch, M-RoPE; pixel bounds count a still image as two frames."""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageSizing, PositionAxes


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    frames = _frames(source)

    def resized(height: int, width: int, *bounds: int) -> tuple[int, int]:
        resized_height, resized_width = smart_resize(frames, height, width, frames, *bounds)
        return resized_height, resized_width

    return sizing.patch_grid(source.processor, resized, frames)


def _frames(source: FamilySource) -> int:
    return int(source.processor.temporal_patch_size)


FAMILY = Family(
    title="GLM-4.1V",
    model_type="glm4v",
    architecture="Glm4vForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_grid_thw"),
    axes=PositionAxes.MROPE,
    has_max_pixels=True,
    frames_per_image=_frames,
    processor_arguments=lambda source, options: sizing.pixel_size(source, options, _frames(source)),
)
