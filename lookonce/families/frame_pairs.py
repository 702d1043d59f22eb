"""Videos as pairs of frames, for families whose vision towers process two frames at a time (Qwen-VL).

Attention in those towers stays inside a pair, so a pair is encoded, cached and fetched like an image, independently of
its neighbours. A family's data file has a `PairRule`; the folder's video processor gives the numbers, and this module
repeats its arithmetic.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.families.base import FamilySource, FramePlace, ImageShape, PairRule
from lookonce.families.sizing import ELONGATED_PIXELS, MAX_ASPECT, grid_shape, most_grid_rows
from lookonce.families.video import MIN_FPS, pixel_settings, processor_settings
from lookonce.image_file import FRAMES_PER_PAIR

# Bound of time steps; no model has positions beyond it.
_MAX_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class PairSettings:
    """The numbers of a folder's video processor."""

    # Fewest and most pixels: of one frame or of all frames together, depending on the family.
    least_pixels: int
    most_pixels: int
    # Pixels along one side of the square that becomes a row.
    factor: int
    # Whether the upper bound also depends on the number of frames.
    has_frame_cap: bool
    # Token budget of a video, from which that bound follows.
    max_video_tokens: int
    # Most pixels of a frame; None: there is no limit beside those above.
    frame_cap: int | None
    # Arguments with which the image processor treats frames as the video processor would.
    pixels: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FramePairs:
    """The video rules of one model folder; see `VideoModel` in video.py. Thread-safe."""

    rule: PairRule
    settings: PairSettings
    # Id of the token that takes rows, from config.json.
    token_id: int
    # Rows of the largest pair.
    most_rows: int
    _config: Any
    frames_per_entry: int = FRAMES_PER_PAIR

    @classmethod
    def load(cls, source: FamilySource, rule: PairRule) -> FramePairs | None:
        """Returns the folder's video rules, or None if config.json has no video token.

        Raises ValueError, TypeError, KeyError or AttributeError if the folder's video processor does not fit.
        """
        token_id = getattr(source.config, "video_token_id", None)
        if token_id is None:
            return None
        settings = _settings(source, rule)
        step = rule.time_steps(source.config, FRAMES_PER_PAIR / MIN_FPS)
        if step is not None and not 0 < step < _MAX_STEP:
            raise ValueError(f"{step:g} time steps between pairs at {MIN_FPS} frames per second are out of range")
        elongated = rule.frame_size(settings, ELONGATED_PIXELS * MAX_ASPECT, ELONGATED_PIXELS, FRAMES_PER_PAIR, None)
        least, most = (
            pixels // rule.bounded_frames(FRAMES_PER_PAIR) for pixels in (settings.least_pixels, settings.most_pixels)
        )
        most = most if settings.frame_cap is None else min(most, settings.frame_cap)
        rows = (elongated[0] * elongated[1] // settings.factor**2, most_grid_rows(least, most, settings.factor))
        return cls(rule, settings, int(token_id), max(rows), source.config)

    @property
    def takes_image_token(self) -> bool:
        """Whether rows take the place of the token of images."""
        return self.rule.takes_image_token

    @property
    def unit(self) -> tuple[int, int]:
        """Pixels along both sides of the square that becomes a row."""
        return self.settings.factor, self.settings.factor

    @property
    def pixels(self) -> Mapping[str, Any]:
        """The settings on which the pixels of frames depend."""
        return self.settings.pixels

    def placeholder(self, token: str) -> str:
        """Returns the text that the frames replace."""
        return self.rule.placeholder(token)

    def least_pixels(self, num_frames: int) -> int:
        """Returns the fewest pixels of a resized frame of such a video, which is the lower bound of `max_pixels`."""
        share = -(-self.settings.least_pixels // self.rule.bounded_frames(num_frames))
        return max(share, self.settings.factor**2)

    def frame_size(self, width: int, height: int, num_frames: int, max_pixels: int | None) -> tuple[int, int]:
        """Returns width and height to which the frames of a video of this size are resized.

        Raises ValueError for a size that the processor refuses.
        """
        resized_height, resized_width = self.rule.frame_size(self.settings, width, height, num_frames, max_pixels)
        return resized_width, resized_height

    def is_frame_size(self, width: int, height: int) -> bool:
        """Whether this is a valid frame size: whole rows, and no more of them than the largest pair has."""
        columns, odd_columns = divmod(width, self.settings.factor)
        rows, odd_rows = divmod(height, self.settings.factor)
        is_whole = odd_columns == odd_rows == 0
        return is_whole and columns > 0 and rows > 0 and rows * columns <= self.most_rows

    def entry_shape(self, frame_size: tuple[int, int]) -> ImageShape:
        """Returns the expansion of a single pair."""
        width, height = frame_size
        return grid_shape(height // self.settings.factor, width // self.settings.factor)

    def shapes(self, frame_size: tuple[int, int], num_frames: int, fps: float) -> list[ImageShape]:
        """Returns the expansion of each pair of a video; together they replace the video's placeholder."""
        alone = self.entry_shape(frame_size)
        step = self.rule.time_steps(self._config, _single(FRAMES_PER_PAIR / fps))
        step = None if step is None else _single(step)
        shapes = []
        for index in range(-(-num_frames // FRAMES_PER_PAIR)):
            first = FRAMES_PER_PAIR * index
            last = min(first + 1, num_frames - 1)
            before, after = self.rule.surrounding_text(self.rule.timed_frame(first, last) / fps)
            parts = [part for part in (before, *alone.parts, after) if part != ""]
            place = None if step is None else FramePlace(index, int(_single(index * step)))
            shapes.append(ImageShape(tuple(parts), alone.grid, place))
        return shapes


def _single(value: float) -> float:
    """Rounds to single precision, in which transformers computes times: truncation must give the same integer."""
    return array("f", [value])[0]


def even_share(settings: PairSettings, most_pixels: int) -> int:
    """Returns the pixel bound of a frame with its share of a token budget, at least 1.05 times the lower bound."""
    return max(most_pixels, int(settings.least_pixels * 1.05))


def _settings(source: FamilySource, rule: PairRule) -> PairSettings:
    given = {**processor_settings(source, rule.defaults), **rule.overrides}
    processor = source.processor
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        if given.get(name, getattr(processor, name)) != getattr(processor, name):
            raise ValueError(f"{name} is {given[name]} for videos, but {getattr(processor, name)} for images")
    if processor.temporal_patch_size != FRAMES_PER_PAIR:
        raise ValueError(f"temporal_patch_size is {processor.temporal_patch_size}, not {FRAMES_PER_PAIR}")
    size = given["size"]
    least, most = (
        int(given.get(name) or size[edge])
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    if not 0 < least <= most:
        raise ValueError(f"the pixel bounds of videos, {least} to {most}, are not valid")
    return PairSettings(
        least_pixels=least,
        most_pixels=most,
        factor=processor.patch_size * processor.merge_size,
        has_frame_cap=bool(given.get("cap_pixels_per_frame")),
        max_video_tokens=int(given["max_video_tokens"]),
        frame_cap=rule.frame_cap(source),
        pixels=pixel_settings(given),
    )
