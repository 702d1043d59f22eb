"""Qwen2-VL: rows follow the image's size, and rotary positions have three axes (time, height, width)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decoder_svc.models.base import ImageLayout
from decoder_svc.request import ImageItem, Positions
from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, InvalidParameterError
from lookonce.model_folder import ModelFolder

# What the image processor takes when its file leaves them out.
_DEFAULT_MIN_PIXELS = 56 * 56
_DEFAULT_MAX_PIXELS = 28 * 28 * 1280


class Qwen2VLFamily:
    """Qwen2-VL and what shares its processor and M-RoPE."""

    model_type = "qwen2_vl"
    num_position_axes = 3
    has_max_pixels = True

    def __init__(self, folder: ModelFolder, image_token: str, image_token_id: int) -> None:
        processor = folder.image_processor_config()
        self.image_token = image_token
        self.image_token_id = image_token_id
        # One row covers merge × merge patches.
        self._factor = int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2))
        self._min_pixels, self._max_pixels = _pixel_bounds(processor)
        self.max_rows_per_image = max(1, self._max_pixels // self._factor**2)

    def image_layout(self, width: int, height: int, options: ProcessorOptions) -> ImageLayout:
        """Merged patches after resizing; `options.max_pixels` lies between the bounds of the model's processor."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        max_pixels = self._max_pixels if options.max_pixels is None else options.max_pixels
        if not self._min_pixels <= max_pixels <= self._max_pixels:
            raise InvalidParameterError(
                "max_pixels", f"must be {self._min_pixels} … {self._max_pixels}, not {max_pixels}"
            )
        try:
            resized_height, resized_width = smart_resize(height, width, self._factor, self._min_pixels, max_pixels)
        except ValueError:
            raise ImageTooLargeError(f"an image of {width}×{height} pixels is too elongated for this model") from None
        grid = (1, resized_height // self._factor, resized_width // self._factor)
        num_rows = grid[1] * grid[2]
        return ImageLayout((self.image_token_id,) * num_rows, num_rows, grid=grid)

    def positions(
        self, token_ids: Sequence[int], images: Sequence[ImageItem], layouts: Sequence[ImageLayout]
    ) -> Positions | None:
        """M-RoPE (arXiv:2409.12191, section 2.1): text advances all axes, an image spans its grid from one origin."""
        axes: tuple[list[int], list[int], list[int]] = ([], [], [])
        position = token = 0
        for item, layout in zip(images, layouts, strict=True):
            assert layout.grid is not None, "every image of this family has a grid"
            position = _append_text(axes, position, item.span.offset - token)
            position = _append_grid(axes, position, layout.grid)
            token = item.span.stop
        position = _append_text(axes, position, len(token_ids) - token)
        return Positions(tuple(tuple(axis) for axis in axes), delta=position - len(token_ids))


def _append_text(axes: tuple[list[int], ...], position: int, num_tokens: int) -> int:
    for axis in axes:
        axis.extend(range(position, position + num_tokens))
    return position + num_tokens


def _append_grid(axes: tuple[list[int], ...], position: int, grid: tuple[int, int, int]) -> int:
    frames, height, width = grid
    for frame in range(frames):
        for row in range(height):
            for column in range(width):
                axes[0].append(position + frame)
                axes[1].append(position + row)
                axes[2].append(position + column)
    return position + max(grid)


def _pixel_bounds(processor: Mapping[str, Any]) -> tuple[int, int]:
    """Fewest and most pixels after resizing; older files say min_pixels and max_pixels, newer ones size."""
    size = processor.get("size") or {}
    smallest = processor.get("min_pixels") or size.get("shortest_edge") or _DEFAULT_MIN_PIXELS
    largest = processor.get("max_pixels") or size.get("longest_edge") or _DEFAULT_MAX_PIXELS
    return int(smallest), int(largest)
