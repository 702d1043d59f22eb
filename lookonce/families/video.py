"""The interface of the rules for videos that a folder has, and the settings of its video processor.

Frames are encoded in pairs (frame_pairs.py) or one by one (single_frames.py). An entry of the cache holds a pair or a
single frame, and is encoded, cached and fetched like an image. transformers' video processors need torchvision, so
their settings are read here, and the image processors of the folders treat the frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lookonce.families.base import FamilySource, ImageShape

# Sampling rate if the request gives none: the default of Qwen's own tools.
DEFAULT_FPS = 2.0
# Accepted range: from a frame every quarter of an hour to far above any camera, so that times stay small integers.
MIN_FPS, MAX_FPS = 0.001, 1000.0
# Arguments of the image processor that may differ between frames and images.
_PIXEL_SETTINGS = ("image_mean", "image_std", "rescale_factor", "resample")
# Steps of the processor that must not be switched off.
STEPS = ("do_resize", "do_rescale", "do_normalize")


class VideoModel(Protocol):
    """The video rules of one model folder. Thread-safe."""

    @property
    def frames_per_entry(self) -> int:
        """Number of frames in an entry of the cache."""

    @property
    def token_id(self) -> int | None:
        """Id of the token that the chat template writes for a video; None: it writes a text."""

    @property
    def takes_image_token(self) -> bool:
        """Whether rows take the place of the token of images; otherwise of that of videos."""

    @property
    def unit(self) -> tuple[int, int]:
        """Numbers of which the width and the height of resized frames are multiples."""

    @property
    def most_rows(self) -> int:
        """Rows of the largest entry."""

    @property
    def pixels(self) -> Mapping[str, Any]:
        """The settings on which the pixels of frames depend, beside those of the image processor."""

    def placeholder(self, token: str) -> str:
        """Returns the text that the frames replace in a rendered prompt; `token` is the token of videos, if any."""

    def least_pixels(self, num_frames: int) -> int | None:
        """Returns the lower bound of `max_pixels` for such a video; None: there is no such option."""

    def frame_size(self, width: int, height: int, num_frames: int, max_pixels: int | None) -> tuple[int, int]:
        """Returns width and height to which the frames of a video of this size are resized.

        Raises ValueError for a size that the processor refuses.
        """

    def is_frame_size(self, width: int, height: int) -> bool:
        """Whether the frames of some video are resized to this size."""

    def entry_shape(self, frame_size: tuple[int, int]) -> ImageShape:
        """Returns the expansion of a single entry with all its rows."""

    def shapes(self, frame_size: tuple[int, int], num_frames: int, fps: float) -> list[ImageShape]:
        """Returns the expansion of each entry of a video; together they replace the video's placeholder."""


def video_token(model: VideoModel, tokenizer: Any) -> str | None:
    """Returns the token that the chat template writes for a video; None: the tokenizer lacks it.

    It is empty if the template writes a text instead.
    """
    if model.token_id is None:
        return ""
    token = tokenizer.convert_ids_to_tokens(model.token_id)
    return None if token is None else str(token)


def processor_settings(source: FamilySource, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the folder's video processor, with the defaults that transformers has.

    Raises ValueError if a step is switched off that the image processor always takes.
    """
    given = {**defaults, **{name: value for name, value in source.video.items() if value is not None}}
    for name in STEPS:
        if not given.get(name, True):
            raise ValueError(f"{name} is switched off for videos")
    return given


def pixel_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which the image processor treats frames as the video processor would."""
    return {name: settings[name] for name in _PIXEL_SETTINGS if name in settings}
