"""Step 3.7 (`step3p7`): square tiles line by line, then the whole image as a square, each between two markers.

The window of tiles depends on the proportions of an image. Layers of the language model may have different numbers of
query heads, and experts may bound their gates.
"""

from __future__ import annotations

import math
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing

# The model's own processor writes these texts whatever its settings are.
_BEGIN, _END = "<im_start>", "<im_end>"
_TILE_BEGIN, _TILE_END, _LINE_END = "<patch_start>", "<patch_end>", "<patch_newline>"
# Two convolutions of the tower halve the sides of its grid.
_STRIDE = 4
# An image whose shorter side becomes the window of its tiles has as many as it is elongated; others have fewer, with
# the settings of published folders at most 36.
_MOST_TILES = 128
_BOUNDS = ("swiglu_limits", "swiglu_limits_shared")


def _rows(source: FamilySource, pixels: int) -> int:
    """Returns the rows that the model's processor writes for a square."""
    return int(pixels // (source.processor.vision_patch_size * source.processor.downsampler_stride)) ** 2


def _tower_rows(source: FamilySource, pixels: int) -> int:
    """Returns the rows that the tower gives for a square."""
    return math.ceil(pixels // int(source.config.vision_config.patch_size) / _STRIDE) ** 2


def _sizing(source: FamilySource) -> ImageSizing:
    processor = source.processor
    whole, tile = processor.size.height, processor.patch_size
    num_whole, num_tile = _rows(source, whole), _rows(source, tile)

    def shape_of(lines: int, columns: int) -> ImageShape:
        parts: list[str | int] = []
        for line in range(lines):
            parts += [_TILE_BEGIN, num_tile, _TILE_END] * columns
            if line < lines - 1:
                parts.append(_LINE_END)
        return ImageShape((*parts, _BEGIN, num_whole, _END))

    # Squares beyond the limit are scaled down to it.
    side = processor.max_image_size
    *_, columns, lines, _ = processor._plan_patches(side, side, whole, tile)
    most_tiles = max(_MOST_TILES, columns * lines)

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        try:
            *_, columns, lines, _ = processor._plan_patches(width, height, whole, tile)
        except ZeroDivisionError:
            raise ValueError("the image is so elongated that scaling it down leaves no pixels") from None
        if columns * lines > most_tiles:
            raise ValueError(f"the image is so elongated that it has more than {most_tiles} tiles")
        return shape_of(lines, columns)

    # All tiles have the same rows, so their arrangement does not matter.
    return ImageSizing(shape, shape_of(1, most_tiles))


def _refusal(source: FamilySource) -> str | None:
    return _processor_refusal(source) or _text_refusal(source.config.text_config)


def _processor_refusal(source: FamilySource) -> str | None:
    processor = source.processor
    sizes = {name: getattr(processor, name) for name in ("max_image_size", "vision_patch_size", "downsampler_stride")}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            return f"{name} of its image processor must be a whole number ≥ 1, not {value!r}"
    if processor.size.height != processor.size.width:
        return f"its image processor makes images of {processor.size.height} × {processor.size.width}, not squares"
    for pixels in (processor.size.height, processor.patch_size):
        if not 1 <= _rows(source, pixels) == _tower_rows(source, pixels):
            return (
                f"squares of {pixels} pixels have {_rows(source, pixels)} rows by its image processor, but its vision "
                f"tower gives {_tower_rows(source, pixels)}"
            )
    return None


def _text_refusal(text: Any) -> str | None:
    if not 0 < text.query_pre_attn_scalar < math.inf:
        return f"query_pre_attn_scalar of its text model must be a number > 0, not {text.query_pre_attn_scalar!r}"
    if not 1 <= text.num_experts_per_tok <= text.n_routed_experts:
        return (
            f"num_experts_per_tok of its text model must be between 1 and n_routed_experts ({text.n_routed_experts}), "
            f"not {text.num_experts_per_tok}"
        )
    for name in _BOUNDS:
        bounds = getattr(text, name) or [None] * text.num_hidden_layers
        if len(bounds) < text.num_hidden_layers:
            return f"{name} of its text model has {len(bounds)} entries for {text.num_hidden_layers} layers"
        # A comparison with NaN is false.
        if wrong := [bound for bound in bounds if bound is not None and not bound >= 0]:
            return f"{name} of its text model must be numbers ≥ 0, not {wrong[0]!r}"
    return None


FAMILY = Family(
    title="Step 3.7",
    model_type="step3p7",
    architecture="Step3p7ForConditionalGeneration",
    sizing=_sizing,
    # Images without tiles have no `pixel_values_local`.
    inputs=("pixel_values", "pixel_values_local", "num_local_patches"),
    needs_torchvision=True,
    refusal=_refusal,
)
