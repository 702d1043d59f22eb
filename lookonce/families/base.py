"""The shape of a family's data file. No torch, no transformers, no pixels.

A family is told by what one image becomes in a prompt (`ImageShape`, from its size alone), where its tokens stand on
the rotary axes, who may look at whom (`Mask`), and what the vision half is called with. All else is one path for all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lookonce.content_key import ProcessorOptions


class Mask(enum.Enum):
    """Which tokens of a prompt see which."""

    # Every token sees itself and those before it.
    CAUSAL = "causal"
    # Besides, the rows of one image see each other, in layers with a window as far back as that.
    IMAGE = "image"
    # All tokens of the prompt see each other, also in layers with a window; generated ones are causal.
    PROMPT = "prompt"


class PositionAxes(enum.Enum):
    """How rotary positions are counted."""

    # 0, 1, 2, …, from `Family.first_position` on.
    SEQUENCE = "sequence"
    # Time, height and width: text advances all three, an image spans its grid (M-RoPE, arXiv:2409.12191, section 2.1).
    MROPE = "mrope"


@dataclass(frozen=True, slots=True)
class FramePlace:
    """Where a pair of frames stands among those of its video, in families that give a video one clock."""

    # 0 begins the video.
    index: int
    # Position on the time axis, counted from the first pair's.
    time: int


@dataclass(frozen=True, slots=True)
class ImageShape:
    """What the placeholder of one image becomes in a prompt."""

    # In order: texts whose tokens take no row, and numbers of tokens that take the next rows.
    parts: tuple[str | int, ...]
    # Merged patches (frames, height, width) where positions depend on them.
    grid: tuple[int, int, int] | None = None
    # Of a pair of frames that shares a clock with others; None: positions are an image's.
    place: FramePlace | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the embedding."""
        return sum(part for part in self.parts if isinstance(part, int))


@dataclass(frozen=True, slots=True)
class ImageSizing:
    """The arithmetic of one model's image processor."""

    # (width, height, options) of an upright image in pixels → what it becomes. Raises ValueError for a size that the
    # processor refuses.
    shape: Callable[[int, int, ProcessorOptions], ImageShape]
    # What the image with the most rows becomes.
    largest: ImageShape


@dataclass(frozen=True, slots=True)
class FamilySource:
    """What a family's rules are read from."""

    # config.json as transformers reads it, with defaults.
    config: Any
    # The folder's image processor, of the kind that needs no torchvision.
    processor: Any
    # processor_config.json without its nested processors; empty when there is none.
    settings: Mapping[str, Any]
    # Names of special tokens that the tokenizer has of its own (boi_token, …); empty where there are none.
    tokens: Mapping[str, str]
    # The folder's video processor; empty when it says nothing of one.
    video: Mapping[str, Any] = field(default_factory=dict)


def _the_token(token: str) -> str:
    return token


def _nothing_around(_seconds: float) -> tuple[str, str]:
    return "", ""


def _no_tick(_config: Any, _seconds: float) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class VideoRule:
    """How a family takes videos, as pairs of frames (video.py)."""

    # Of its video processor in transformers, where a folder does not say.
    defaults: Mapping[str, Any]
    # (settings, width, height, number of frames, most pixels of a frame) → (height, width) after resizing. Raises
    # ValueError for a size that the processor refuses.
    frame_size: Callable[[Any, int, int, int, int | None], tuple[int, int]]
    # Of so many frames, how many share the processor's bounds.
    bounded_frames: Callable[[int], int]
    # The video token as the chat template writes it → what the pairs take the place of.
    placeholder: Callable[[str], str] = _the_token
    # Text before and after the rows of the pair that is shown at this time, seconds.
    around: Callable[[float], tuple[str, str]] = _nothing_around
    # (configuration, seconds from pair to pair of one video) → steps on the time axis; None: each pair is placed as an
    # image is.
    tick: Callable[[Any, float], float | None] = _no_tick


def _no_levels(_config: Any) -> int:
    return 0


def _no_arguments(_source: FamilySource, _options: ProcessorOptions) -> Mapping[str, Any]:
    return {}


def _nothing_of_text(_config: Any) -> Mapping[str, Any]:
    return {}


def _one_frame(_source: FamilySource) -> int:
    return 1


def _no_placeholder(_source: FamilySource) -> str | None:
    return None


def _one_copy(_shape: ImageShape, _options: ProcessorOptions) -> int:
    return 1


def _nothing_wrong(_source: FamilySource) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """One vision-language family."""

    # As its authors write it.
    title: str
    # Hugging Face model type, and the class that serves it.
    model_type: str
    architecture: str
    # The rule from size to rows.
    sizing: Callable[[FamilySource], ImageSizing]
    # What of the image processor's output goes to `get_image_features`, batches joined along the first axis.
    inputs: tuple[str, ...] = ("pixel_values",)
    # Text that stands for one image in a rendered prompt; None: the token that takes the rows.
    placeholder: Callable[[FamilySource], str | None] = _no_placeholder
    mask: Mask = Mask.CAUSAL
    axes: PositionAxes = PositionAxes.SEQUENCE
    first_position: int = 0
    # Feature levels that travel beside each row (deepstack), from the configuration.
    num_levels: Callable[[Any], int] = _no_levels
    # None: it takes no videos.
    video: VideoRule | None = None
    # Whether requests may bound an image's pixels, and how options reach the image processor.
    has_max_pixels: bool = False
    # What a still image counts as where the processor's bounds are on pixels times frames.
    frames_per_image: Callable[[FamilySource], int] = _one_frame
    processor_arguments: Callable[[FamilySource, ProcessorOptions], Mapping[str, Any]] = _no_arguments
    # Whether an image is processed differently beside others in its prompt.
    depends_on_image_count: bool = False
    # What of the language model's configuration decides rows, too, from the whole configuration.
    text_settings: Callable[[Any], Mapping[str, Any]] = _nothing_of_text
    # How often an image stands in its own pass; only the first one's rows count.
    num_copies: Callable[[ImageShape, ProcessorOptions], int] = _one_copy
    # A rendered text as the model wants it, from the text and the tokenizer's BOS; None: as it is.
    finish_text: Callable[[str, str], str] | None = None
    # Says why a folder of this type cannot be served; None where it can.
    refusal: Callable[[FamilySource], str | None] = _nothing_wrong

    @property
    def has_levels(self) -> bool:
        """Whether feature levels travel beside the rows."""
        return self.num_levels is not _no_levels
