"""Videos as single frames, for families whose vision towers see each frame by itself, like an image.

A family's data file has a `FrameRule`; the folder's video processor gives the numbers. Rows of a frame depend neither
on the other frames nor on their number, so videos that overlap share all frames that they have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.families.base import FamilySource, FrameRule, FrameSizing, ImageShape
from lookonce.families.video import STEPS, pixel_settings, processor_settings

# Settings of pixels in transformers' video processors for CLIP's and SigLIP's towers; 3 is bicubic.
CLIP_PIXELS: Mapping[str, Any] = {
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True, slots=True)
class SingleFrames:
    """The video rules of one model folder; see `VideoModel` in video.py. Thread-safe."""

    rule: FrameRule
    sizing: FrameSizing
    # The image processor that treats frames, and its arguments.
    processor: Any
    arguments: Mapping[str, Any]
    # Id of the token that the chat template writes for a video, from config.json; None: it writes a text.
    token_id: int | None
    _source: FamilySource
    _placeholder: str | None
    frames_per_entry: int = 1

    @classmethod
    def load(cls, source: FamilySource, rule: FrameRule) -> SingleFrames | None:
        """Returns the folder's video rules, or None if its files name no video token.

        Raises ValueError, TypeError, KeyError or AttributeError if the folder's video processor does not fit.
        """
        placeholder = rule.placeholder(source)
        token_id = getattr(source.config, "video_token_id", None) if placeholder is None else None
        if placeholder is None and token_id is None:
            return None
        settings = processor_settings(source, rule.defaults)
        # An image processor may leave out steps that are taken for frames.
        arguments = {**dict.fromkeys(STEPS, True), **pixel_settings(settings), **rule.arguments(settings)}
        sizing = rule.sizing(source, settings)
        return cls(rule, sizing, rule.processor(source), arguments, token_id, source, placeholder)

    @property
    def takes_image_token(self) -> bool:
        """Whether rows take the place of the token of images."""
        return self.token_id is None

    @property
    def unit(self) -> tuple[int, int]:
        """Width and height of the square that becomes a row."""
        return self.sizing.unit

    @property
    def most_rows(self) -> int:
        """Rows of the largest entry."""
        return self.sizing.most_units * self.sizing.rows_per_unit

    @property
    def pixels(self) -> Mapping[str, Any]:
        """The settings on which the pixels of frames depend."""
        return {"processor": type(self.processor).__name__, **self.arguments}

    def placeholder(self, token: str) -> str:
        """Returns the text that the frames replace."""
        return self._placeholder or token

    def least_pixels(self, _num_frames: int) -> int | None:
        """Returns None: the sizes of frames cannot be chosen."""

    def frame_size(self, width: int, height: int, _num_frames: int, _max_pixels: int | None) -> tuple[int, int]:
        """Returns width and height of the pixels that the tower sees of a frame of this size.

        Raises ValueError for a size that the processor refuses.
        """
        return self.sizing.size(width, height)

    def is_frame_size(self, width: int, height: int) -> bool:
        """Whether frames are resized to this size."""
        return 0 < self._num_units(width, height) <= self.sizing.most_units

    def entry_shape(self, frame_size: tuple[int, int]) -> ImageShape:
        """Returns the expansion of an entry with all its rows."""
        return ImageShape((self._num_units(*frame_size) * self.sizing.rows_per_unit,))

    def shapes(self, frame_size: tuple[int, int], num_frames: int, fps: float) -> list[ImageShape]:
        """Returns the expansion of each frame."""
        num_rows = self.entry_shape(frame_size).num_rows
        shapes = []
        for index in range(num_frames):
            num_unused = 0 if index == num_frames - 1 else self.rule.num_closing_rows
            before, after = self.rule.texts(self._source, index, num_frames, fps)
            parts = tuple(part for part in (before, num_rows - num_unused, after) if part != "")
            shapes.append(ImageShape(parts, num_unused_rows=num_unused))
        return shapes

    def _num_units(self, width: int, height: int) -> int:
        """Returns the number of units of a frame, 0 for a size that is no multiple of them."""
        (columns, odd_width), (lines, odd_height) = (
            divmod(side, unit) for side, unit in zip((width, height), self.unit, strict=True)
        )
        return 0 if odd_width or odd_height or min(columns, lines) < 1 else columns * lines


def fixed_size(settings: Mapping[str, Any], side: int, num_rows: int) -> FrameSizing:
    """Returns the sizing of a processor that makes every frame a square, as large as the tower's images.

    `side` is its length in pixels, `num_rows` its number of rows. Raises ValueError for other processors.
    """
    name = "crop_size" if settings.get("do_center_crop") else "size"
    given = settings[name]
    # A number alone is the side of what is cut out, but the shorter side of what is resized, which need be no square.
    sides = {"height": given, "width": given} if isinstance(given, int) and name == "crop_size" else given
    if not isinstance(sides, Mapping) or (sides.get("height"), sides.get("width")) != (side, side):
        raise ValueError(f"{name} is {given} for videos, and the tower sees squares of {side} pixels")
    return FrameSizing(lambda _width, _height: (side, side), (side, side), num_rows)


def plain_processor(_source: FamilySource) -> Any:
    """Returns an image processor that resizes, crops and normalises, and cuts nothing into tiles."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil()


def plain_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `plain_processor`."""
    crops = bool(settings.get("do_center_crop"))
    return {
        "size": settings["size"],
        "do_center_crop": crops,
        **({"crop_size": settings["crop_size"]} if crops else {}),
    }


def timestamp(index: int, fps: float) -> str:
    """Returns the time of a frame as minutes and seconds, such as 00:07."""
    seconds = index / fps
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
