"""Perception LM (arXiv:2504.13180): a thumbnail and tiles, one row per square of patches, without text between them.

A frame of a video is a single tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, FrameRule, FrameSizing, ImageShape, ImageSizing
from lookonce.families.single_frames import fixed_size
from lookonce.families.timm_tower import tower_refusal

# Whether each tower starts its output with a class row. The patches of both have 14 × 14 pixels.
_TOWERS = {"vit_pe_core_large_patch14_336": True, "vit_pe_core_gigantic_patch14_448": False}
_PATCH = 14
_TOWER_ARGUMENTS = (
    *("depth", "embed_dim", "global_pool", "img_size", "init_values", "ref_feat_shape", "use_post_transformer_norm"),
)
_TILED = "thumb+tile"


def _rows_per_tile(source: FamilySource) -> int:
    side: int = source.processor.tile_size // _PATCH // source.config.projector_pooling_ratio
    return side * side


def _sizing(source: FamilySource) -> ImageSizing:
    processor, rows_per_tile = source.processor, _rows_per_tile(source)
    side = processor.tile_size
    is_tiled = processor.vision_input_type == _TILED

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        if not is_tiled:
            return ImageShape((rows_per_tile,))
        columns, lines = processor._fit_image_to_canvas(width, height, side) or processor._find_closest_aspect_ratio(
            width, height, side
        )
        return ImageShape(((1 + columns * lines) * rows_per_tile,))

    return ImageSizing(shape, ImageShape(((1 + is_tiled * processor.max_num_tiles) * rows_per_tile,)))


def _refusal(source: FamilySource) -> str | None:
    config, processor, settings = source.config, source.processor, source.settings
    refusal = tower_refusal(config, _TOWERS, _TOWER_ARGUMENTS)
    if refusal is not None:
        return refusal
    vision = config.vision_config
    if config.vision_use_cls_token != _TOWERS[vision.architecture.partition(".")[0]]:
        return f"vision_use_cls_token is {config.vision_use_cls_token}, which does not fit the tower"
    side = processor.tile_size
    if list(vision.model_args["img_size"]) != [side, side]:
        return f"tile_size is {side} pixels, but the tower takes images of {vision.model_args['img_size']}"
    written = settings["patch_size"], settings.get("pooling_ratio", 2)
    if written != (_PATCH, config.projector_pooling_ratio):
        return (
            f"patch_size and pooling_ratio in processor_config.json are {written}, but those of the model are "
            f"{(_PATCH, config.projector_pooling_ratio)}"
        )
    return None if processor.do_resize else "an image processor that does not resize is not supported"


def _frame_sizing(source: FamilySource, settings: Mapping[str, Any]) -> FrameSizing:
    return fixed_size(settings, source.processor.tile_size, _rows_per_tile(source))


VIDEO = FrameRule(
    defaults={
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"height": 448, "width": 448},
    },
    sizing=_frame_sizing,
    # Anything but tiles with a thumbnail.
    arguments=lambda _settings: {"vision_input_type": "single"},
)

FAMILY = Family(
    title="Perception LM",
    model_type="perception_lm",
    architecture="PerceptionLMForConditionalGeneration",
    sizing=_sizing,
    needs_torchvision=True,
    needs_timm=True,
    video=VIDEO,
    refusal=_refusal,
)
