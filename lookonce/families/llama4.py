"""Llama 4 (`llama4`): tiles of one size with separators, then the whole image, between two markers."""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing

# The model's processor writes these texts whatever its settings are.
_BEGIN, _END, _WHOLE = "<|image_start|>", "<|image_end|>", "<|image|>"
_BESIDE, _BELOW = "<|tile_x_separator|>", "<|tile_y_separator|>"


def _rows_per_tile(source: FamilySource) -> int:
    patches = source.processor.size.height // source.settings.get("patch_size", 14)
    return int(patches**2 // round(1 / _shuffle_ratio(source) ** 2))


def _shuffle_ratio(source: FamilySource) -> float:
    return float(source.settings.get("pixel_shuffle_ratio", 0.5))


def _sizing(source: FamilySource) -> ImageSizing:
    # The processor's own function takes the resolutions as a tensor.
    import torch
    from transformers.models.llama4.image_processing_llama4 import find_supported_resolutions, get_best_fit

    processor, num_rows = source.processor, _rows_per_tile(source)
    side = processor.size.height
    canvases = torch.tensor(find_supported_resolutions(processor.max_patches, processor.size))

    def shape_of(lines: int, columns: int) -> ImageShape:
        parts: list[str | int] = []
        if lines * columns > 1:
            for _ in range(lines):
                for _ in range(columns - 1):
                    parts += [num_rows, _BESIDE]
                parts += [num_rows, _BELOW]
        return ImageShape((_BEGIN, *parts, _WHOLE, num_rows, _END))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        canvas = get_best_fit((height, width), canvases, resize_to_max_canvas=processor.resize_to_max_canvas)
        lines, columns = (canvas // side).tolist()
        return shape_of(lines, columns)

    # All tiles have the same rows and as many separators, so their arrangement does not matter.
    return ImageSizing(shape, shape_of(1, processor.max_patches))


def _refusal(source: FamilySource) -> str | None:
    processor, vision = source.processor, source.config.vision_config
    if not processor.do_resize:
        return "an image processor that does not resize is not supported"
    if {processor.size.height, processor.size.width} != {vision.image_size}:
        return (
            f"its image processor makes tiles of {processor.size.height} × {processor.size.width} pixels, but its "
            f"vision tower takes squares of {vision.image_size}"
        )
    num_patches = vision.image_size // vision.patch_size
    of_model = int(num_patches * vision.pixel_shuffle_ratio) ** 2
    if _rows_per_tile(source) != of_model:
        return (
            f"its processor_config.json gives {_rows_per_tile(source)} rows per tile, by patch_size and "
            f"pixel_shuffle_ratio, but its vision tower gives {of_model}"
        )
    return None


FAMILY = Family(
    title="Llama 4",
    model_type="llama4",
    architecture="Llama4ForConditionalGeneration",
    sizing=_sizing,
    placeholder=lambda source: source.settings.get("image_token", _WHOLE),
    rows=lambda half, output: half.multi_modal_projector(output.last_hidden_state),
    needs_torchvision=True,
    refusal=_refusal,
)
