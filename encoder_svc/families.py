"""What differs between vision-language families on the encoder's side: pixels of one image, rows of a batch.

Everything else is one path for all. Adapters are stateless after construction and may be used from several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import PIL.Image
import torch
import transformers

from lookonce.content_key import ProcessorOptions
from lookonce.errors import InvalidParameterError, ModelFolderError
from lookonce.model_folder import ModelFolder

# Towers with a fixed input size; Pixtral's, which also goes under "llava", needs sizes and row breaks.
_LLAVA_TOWERS = frozenset({"clip_vision_model", "siglip_vision_model"})


@dataclass(frozen=True, slots=True)
class PixelInputs:
    """What the image processor makes of one image."""

    # LLaVA: [1, channels, height, width]. Qwen2-VL: [num_patches, channels * frames * patch²]. fp32.
    pixel_values: torch.Tensor
    # Patches (frames, height, width) where the family's rows depend on the size.
    grid: tuple[int, int, int] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the pixels."""
        num_bytes: int = self.pixel_values.nbytes
        return num_bytes


class VisionFamily(Protocol):
    """One family, as the encoder needs to know it."""

    # The Hugging Face image processor, on its PIL backend.
    processor: Any

    def check_options(self, options: ProcessorOptions) -> None:
        """Raises InvalidParameterError for options that the family does not have or values out of range."""
        ...

    def pixel_inputs(self, image: PIL.Image.Image, options: ProcessorOptions) -> PixelInputs:
        """Pixels of one upright RGB image; `options` have been checked."""
        ...

    def image_rows(self, model: Any, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        """One forward pass: rows [num_rows, hidden_size] of each image, in order, of the model's dtype."""
        ...


class LlavaFamily:
    """LLaVA: every image becomes one square of a fixed size."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def check_options(self, options: ProcessorOptions) -> None:
        """The input size is fixed, so there is no option."""
        if options.max_pixels is not None:
            raise InvalidParameterError("max_pixels", "this model resizes every image to one size; leave it unset")

    def pixel_inputs(self, image: PIL.Image.Image, options: ProcessorOptions) -> PixelInputs:
        """pixel_values [1, channels, height, width]."""
        processed = self.processor(images=image, return_tensors="pt")
        return PixelInputs(processed["pixel_values"])

    def image_rows(self, model: Any, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        """One stacked batch."""
        pixels = torch.cat([inputs.pixel_values for inputs in batch]).to(model.dtype)
        return list(model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output)


class Qwen2VLFamily:
    """Qwen2-VL: the number of patches follows the image's size; patches of all images are one long sequence."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._min_pixels: int = processor.size.shortest_edge
        self._max_pixels: int = processor.size.longest_edge

    def check_options(self, options: ProcessorOptions) -> None:
        """max_pixels lies between the bounds of the model's own processor."""
        if options.max_pixels is not None and not self._min_pixels <= options.max_pixels <= self._max_pixels:
            raise InvalidParameterError(
                "max_pixels", f"must be {self._min_pixels} … {self._max_pixels}, not {options.max_pixels}"
            )

    def pixel_inputs(self, image: PIL.Image.Image, options: ProcessorOptions) -> PixelInputs:
        """pixel_values [num_patches, patch elements] and the grid of patches before merging."""
        longest = self._max_pixels if options.max_pixels is None else options.max_pixels
        size = {"shortest_edge": self._min_pixels, "longest_edge": longest}
        processed = self.processor(images=image, size=size, return_tensors="pt")
        frames, height, width = processed["image_grid_thw"][0].tolist()
        return PixelInputs(processed["pixel_values"], (frames, height, width))

    def image_rows(self, model: Any, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        """All patches in one sequence; attention stays inside each image."""
        pixels = torch.cat([inputs.pixel_values for inputs in batch]).to(model.dtype)
        grids = torch.tensor([inputs.grid for inputs in batch], dtype=torch.int64)
        output = model.get_image_features(pixel_values=pixels, image_grid_thw=grids, return_dict=True)
        return list(output.pooler_output)


def load_family(folder: ModelFolder) -> VisionFamily:
    """The adapter of a folder's model type with the folder's image processor.

    Raises ModelFolderError when the folder has no image processor or a vision tower that the family does not know.
    """
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            folder.path, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder.path} has no usable image processor: {error}") from error
    if getattr(processor, "backend", None) != "pil":
        raise ModelFolderError(f"{folder.path}: {type(processor).__name__} does not work without torchvision")
    if folder.model_type == "qwen2_vl":
        return Qwen2VLFamily(processor)
    tower = folder.config.get("vision_config", {}).get("model_type")
    if tower not in _LLAVA_TOWERS:
        raise ModelFolderError(f"{folder.path}: LLaVA with the vision tower {tower!r} is not supported")
    return LlavaFamily(processor)
