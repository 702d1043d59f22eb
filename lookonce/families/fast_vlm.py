"""FastVLM (arXiv:2412.13303): one square, of which a tower with convolutions makes a row per 64 × 64 pixels."""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.timm_tower import tower_refusal

# Pixels along one side of a row, of each tower.
_ROW_PIXELS = {"fastvit_mci3": 64}
_TOWER_ARGUMENTS = ("inference_mode", "layers", "embed_dims")


def _sizing(source: FamilySource) -> ImageSizing:
    crop, side = source.processor.crop_size, _row_pixels(source)
    return sizing.constant(ImageShape((crop.height // side * (crop.width // side),)))


def _row_pixels(source: FamilySource) -> int:
    return _ROW_PIXELS[source.config.vision_config.architecture.partition(".")[0]]


def _refusal(source: FamilySource) -> str | None:
    refusal = tower_refusal(source.config, _ROW_PIXELS, _TOWER_ARGUMENTS)
    if refusal is not None:
        return refusal
    if not source.processor.do_center_crop:
        return "an image processor that does not crop (do_center_crop) is not supported"
    crop, side = source.processor.crop_size, _row_pixels(source)
    if crop.height % side or crop.width % side:
        return f"crop_size is {crop.height} × {crop.width} pixels, but the tower makes one row of {side} × {side}"
    settings = source.settings
    if settings["patch_size"] != side:
        return f"patch_size in processor_config.json is {settings['patch_size']}, but the tower's is {side}"
    num_others = settings.get("num_additional_image_tokens", 0)
    if num_others != (settings.get("vision_feature_select_strategy") == "default"):
        return "its processor_config.json counts rows that the tower does not make (num_additional_image_tokens)"
    return None


FAMILY = Family(
    title="FastVLM",
    model_type="fast_vlm",
    architecture="FastVlmForConditionalGeneration",
    sizing=_sizing,
    needs_timm=True,
    refusal=_refusal,
)
