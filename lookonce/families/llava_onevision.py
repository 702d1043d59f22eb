"""LLaVA-OneVision (arXiv:2408.03326): LLaVA-NeXT's tiles up to a limit; no tiles if the prompt has several images.

Two by two rows of a video's frame become one, and a newline row follows the last frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, FrameRule, FrameSizing, ImageShape, ImageSizing
from lookonce.families.single_frames import CLIP_PIXELS, fixed_size, plain_arguments, plain_processor

# Grids that exceed the limit by up to this factor are not scaled down, as in the model's training.
_TOLERANCE = 1.1
_ASPECT_PREFIX = "anyres_max_"


def _sizing(source: FamilySource) -> ImageSizing:
    config = source.config
    resolutions = source.processor.image_grid_pinpoints
    tile = config.vision_config.image_size
    side = sizing.square_patches(config.vision_config)
    most_tiles = int(config.vision_aspect_ratio.removeprefix(_ASPECT_PREFIX))
    beside_others = ImageShape((side * side + 1,))

    def shape_of(lines: int, columns: int) -> ImageShape:
        ratio = math.sqrt(lines * columns / (most_tiles * side**2))
        if ratio > _TOLERANCE:
            lines, columns = int(lines // ratio), int(columns // ratio)
        return ImageShape((side * side + lines * (columns + 1),))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        if options.beside_others:
            return beside_others
        canvas_height, canvas_width = sizing.best_resolution(width, height, resolutions)
        return shape_of(*sizing.unpadded_grid(width, height, canvas_height // tile * side, canvas_width // tile * side))

    # An unpadded grid may have more rows than a full grid, because the full one is scaled down.
    grids = ((h // tile * side, w // tile * side) for h, w in resolutions)
    unpadded = {
        cut for h, w in grids for cut in (*((n, w) for n in range(1, h + 1)), *((h, n) for n in range(1, w + 1)))
    }
    return ImageSizing(shape, max((shape_of(*cut) for cut in unpadded), key=lambda s: s.num_rows))


def _refusal(source: FamilySource) -> str | None:
    config = source.config
    if not str(config.vision_aspect_ratio).startswith(_ASPECT_PREFIX):
        return f"vision_aspect_ratio {config.vision_aspect_ratio!r} is not supported, only {_ASPECT_PREFIX}N"
    if sizing.has_class_row(config.vision_config) != (config.vision_feature_select_strategy == "default"):
        return "LLaVA-OneVision that keeps a class row, or drops a patch, is not supported"
    return None


def _frame_sizing(source: FamilySource, settings: Mapping[str, Any]) -> FrameSizing:
    config = source.config
    side = math.ceil(sizing.square_patches(config.vision_config) / 2)
    return fixed_size(settings, config.vision_config.image_size, side * side + 1)


VIDEO = FrameRule(
    defaults={**CLIP_PIXELS, "size": {"height": 384, "width": 384}},
    sizing=_frame_sizing,
    arguments=plain_arguments,
    processor=plain_processor,
    has_video_method=True,
    num_closing_rows=1,
)

FAMILY = Family(
    title="LLaVA-OneVision",
    model_type="llava_onevision",
    architecture="LlavaOnevisionForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_sizes", "batch_num_images"),
    depends_on_image_count=True,
    # An image of a multi-image prompt is encoded next to a copy of itself, so its rows depend on no other image.
    num_copies=lambda _shape, options: 2 if options.beside_others else 1,
    video=VIDEO,
    refusal=_refusal,
)
