"""The interface of a family: placeholders, row counts and positions. No torch, no pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decoder_svc.request import ImageItem, Positions
from lookonce.content_key import ProcessorOptions


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What one placeholder of a prompt becomes for an image of a given size."""

    # The token ids that replace the one placeholder.
    token_ids: tuple[int, ...]
    # Rows of the embedding.
    num_rows: int
    # Row of each token, None for a token without a row. None: every token takes the next row.
    row_of_token: tuple[int | None, ...] | None = None
    # Merged patches (frames, height, width) where positions depend on them, else None.
    grid: tuple[int, int, int] | None = None


class FamilyAdapter(Protocol):
    """One vision-language family, as the decoder needs to know it."""

    # Hugging Face model type, e.g. "llava".
    model_type: str
    # Text of the placeholder that stands for one image in a rendered prompt, and its id.
    image_token: str
    image_token_id: int
    # Rotary position axes: 1, or 3 for M-RoPE.
    num_position_axes: int
    # Rows of the largest image that the processor can make.
    max_rows_per_image: int
    # Whether ImageSource.max_pixels means something here.
    has_max_pixels: bool

    def image_layout(self, width: int, height: int, options: ProcessorOptions) -> ImageLayout:
        """Layout of an upright image of this size in pixels. Raises ImageTooLargeError for a size it cannot take."""
        ...

    def positions(
        self, token_ids: Sequence[int], images: Sequence[ImageItem], layouts: Sequence[ImageLayout]
    ) -> Positions | None:
        """Rotary positions of an expanded prompt, None for 0, 1, 2, …"""
        ...
