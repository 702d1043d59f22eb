"""LLaVA: one placeholder per image, a constant number of rows, plain rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decoder_svc.models.base import ImageLayout
from decoder_svc.request import ImageItem, Positions
from lookonce.content_key import ProcessorOptions
from lookonce.errors import ModelFolderError
from lookonce.model_folder import ModelFolder

# Towers with a class token before the patches; the "default" strategy drops the first row whatever it is.
_NUM_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


class LlavaFamily:
    """LLaVA with a CLIP or SigLIP tower."""

    model_type = "llava"
    num_position_axes = 1
    has_max_pixels = False

    def __init__(self, folder: ModelFolder, image_token: str, image_token_id: int) -> None:
        self.image_token = image_token
        self.image_token_id = image_token_id
        self.max_rows_per_image = num_rows(folder.config)
        self._layout = ImageLayout((image_token_id,) * self.max_rows_per_image, self.max_rows_per_image)

    def image_layout(self, width: int, height: int, options: ProcessorOptions) -> ImageLayout:
        """The same for every size: the processor resizes to the tower's."""
        return self._layout

    def positions(
        self, token_ids: Sequence[int], images: Sequence[ImageItem], layouts: Sequence[ImageLayout]
    ) -> Positions | None:
        """0, 1, 2, …"""
        return None


def num_rows(config: Mapping[str, Any]) -> int:
    """Rows that the tower gives for one image. Raises ModelFolderError for a tower that this family does not cover."""
    vision = config.get("vision_config", {})
    tower = vision.get("model_type")
    if tower not in _NUM_CLASS_TOKENS:
        raise ModelFolderError(f"LLaVA with a vision tower of type {tower} is not supported")
    num_patches = (vision.get("image_size", 224) // vision.get("patch_size", _default_patch_size(tower))) ** 2
    dropped = 1 if config.get("vision_feature_select_strategy", "default") == "default" else 0
    return int(num_patches) + _NUM_CLASS_TOKENS[tower] - dropped


def _default_patch_size(tower: str) -> int:
    """What the tower's configuration class takes when the file leaves it out."""
    return 32 if tower == "clip_vision_model" else 16
